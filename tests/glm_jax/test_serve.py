"""The command line: vLLM's flags reach the engine, and what cannot be served ends in one line."""

import socket
from pathlib import Path

import pytest

import serving.server
from glm_jax.serve import main
from serving.engine_config import EngineConfig
from serving.server import ServerConfig


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ServerConfig, EngineConfig]]:
    """What the command line would have started."""
    calls: list[tuple[ServerConfig, EngineConfig]] = []

    def run(server: ServerConfig, engine: EngineConfig) -> int:
        calls.append((server, engine))
        return 0

    monkeypatch.setattr(serving.server, "run", run)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    return calls


def test_the_shipped_checkpoint_is_the_default(started: list) -> None:
    assert main([]) == 0
    assert started == [(ServerConfig(model="tiny", dtype=None), EngineConfig())]


@pytest.mark.parametrize("arguments", [["folder"], ["--model", "folder"], ["folder", "--model", "folder"]])
def test_the_model_by_position_or_flag(started: list, arguments: list[str]) -> None:
    assert main(arguments) == 0
    assert started[0][0].model == "folder"


def test_flags_reach_their_fields(started: list) -> None:
    flags = (
        "m --host 0.0.0.0 --port 81 --served-model-name a b --api-key k --dtype float32 "
        "--chat-template t.jinja --enable-prompt-tokens-details --trust-remote-code "
        "--max-model-len 512 --max-num-seqs 3 "
        "--max-num-batched-tokens 99 --gpu-memory-utilization 0.5 --num-gpu-blocks-override 64 "
        "--block-size 16 --snapshot-spacing 32 --uvicorn-log-level error"
    )
    assert main(flags.split()) == 0
    server, engine = started[0]
    assert server == ServerConfig(
        model="m",
        host="0.0.0.0",
        port=81,
        dtype="float32",
        served_model_names=("a", "b"),
        api_key="k",
        chat_template="t.jinja",
        enable_prompt_tokens_details=True,
        log_level="error",
    )
    assert engine == EngineConfig(
        max_model_len=512,
        max_num_seqs=3,
        max_num_batched_tokens=99,
        gpu_memory_utilization=0.5,
        num_gpu_blocks_override=64,
        block_size=16,
        snapshot_spacing=32,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--model", "b"], "MODEL 'a' and --model 'b' differ"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--port", "x"], "invalid int value: 'x'"),
    ],
)
def test_bad_flags(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-num-seqs", "0"], "error: max_num_seqs must be at least 1, got 0\n"),
        (["./no-such-folder", "--port", "0"], "no-such-folder"),
    ],
)
def test_what_cannot_be_served(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_taken_port_is_known_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main([str(tmp_path), "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err
