"""`python -m glm_jax.serve [MODEL | --model MODEL]`: the OpenAI-compatible server, with vLLM's flag names."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMPILATION_CACHE = Path.home() / ".cache" / "glm_jax" / "compiled"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m glm_jax.serve", description="Serve a glm5_next checkpoint over the OpenAI API."
    )
    add = parser.add_argument
    add("positional_model", metavar="MODEL", nargs="?", help="same as --model")
    add("--model", help='a Hugging Face folder, a Hub id or "tiny", the checkpoint shipped here (default)')
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    add("--served-model-name", nargs="+", default=[], metavar="NAME", help="names that clients may use")
    add("--api-key", help="require this bearer key under /v1")
    add("--dtype", default="auto", help="bfloat16, float32, ...; auto: the checkpoint's own (default)")
    add("--chat-template", metavar="FILE", help="a Jinja file instead of the checkpoint's template")
    add("--enable-prompt-tokens-details", action="store_true", help="report cached tokens in usage")
    add("--trust-remote-code", action="store_true", help="accepted, has no effect: no remote code is run")
    add("--tensor-parallel-size", "-tp", type=int, default=1, metavar="N", help="devices to spread over")
    add("--max-model-len", type=int, help="most tokens of a request, answer included (default: the model's)")
    add("--max-num-seqs", type=int, help="most answers generated at once")
    add("--max-num-batched-tokens", type=int, help="most tokens in one engine step")
    add("--max-num-queued-reqs", type=int, help="most requests waiting; more are refused (default: no limit)")
    add("--gpu-memory-utilization", type=float, help="share of device memory for weights and cache")
    add("--num-gpu-blocks-override", type=int, help="number of cache blocks, instead of what fits")
    add("--num-state-slots-override", type=int, help="number of state slots, instead of what fits")
    add("--block-size", type=int, help="tokens of a cache block")
    add("--snapshot-spacing", type=int, help="tokens between regular snapshots of a prompt's states")
    add("--kv-cache-dtype", help="auto (the compute dtype), bfloat16 or fp8")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, help="reuse computed prefixes (on)")
    add(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="plan one step ahead (on)",
    )
    add(
        "--speculative-config",
        type=_json_object,
        metavar="JSON",
        help='drafts, as \'{"method": "mtp", "num_speculative_tokens": 3}\' (default: none)',
    )
    add("--uvicorn-log-level", default="info", help="debug, info, warning or error (default: %(default)s)")
    return parser


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the server until it is interrupted; bad flags and models end in one line and exit code 2."""
    flags = parser().parse_args(arguments)
    if flags.model and flags.positional_model and flags.model != flags.positional_model:
        parser().error(f"MODEL {flags.positional_model!r} and --model {flags.model!r} differ: give one")
    # force: libraries imported before this have set handlers of their own
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", force=True)
    for package in ("glm_jax", "serving"):
        logging.getLogger(package).setLevel(logging.INFO)
    _keep_compiled_programs()

    from serving.engine_config import EngineConfig
    from serving.server import ServerConfig, run

    engine_fields = EngineConfig.__dataclass_fields__
    given = {
        name: value for name, value in vars(flags).items() if name in engine_fields and value is not None
    }
    server = ServerConfig(
        model=flags.model or flags.positional_model or "tiny",
        host=flags.host,
        port=flags.port,
        dtype=None if flags.dtype == "auto" else flags.dtype,
        served_model_names=tuple(flags.served_model_name),
        api_key=flags.api_key,
        chat_template=flags.chat_template,
        tensor_parallel_size=flags.tensor_parallel_size,
        enable_prompt_tokens_details=flags.enable_prompt_tokens_details,
        log_level=flags.uvicorn_log_level,
    )
    try:
        return run(server, EngineConfig(**given))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _keep_compiled_programs() -> None:
    """Compiled programs outlive the process, unless the user has set a place for them."""
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(COMPILATION_CACHE))


if __name__ == "__main__":
    sys.exit(main())
