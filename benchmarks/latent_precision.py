"""What narrow latents cost: `python -m benchmarks.latent_precision`.

Negative log-likelihood of held-out answers (word problems behind twenty solved ones, recall from a list),
teacher-forced through the engine: each text is a prompt whose log-probabilities are asked for, over a cache
of float32, bfloat16 and fp8 latents. Weights and everything else are float32.
"""

import argparse
import datetime
import random
from pathlib import Path
from typing import Any

import jax
import numpy as np

import glm_jax
from benchmarks.kernels.harness import RESULTS, table, write
from benchmarks.tiny.cases import Case, problem_case, recall_case
from serving import Engine, EngineConfig

LATENTS = {"float32": "auto", "bfloat16": "bfloat16", "fp8": "fp8"}
MOST_FP8_COST = 0.01  # nats a token, over bfloat16
SEED = 20261202


def losses(model: glm_jax.Model, cases: list[Case], kv_cache_dtype: str) -> np.ndarray:
    """`[answer tokens]` of all cases in order, nats."""
    context = -(-(max(case.stop for case in cases) + 1) // 64) * 64
    engine = Engine(
        model,
        EngineConfig(
            max_model_len=context,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            kv_cache_dtype=kv_cache_dtype,
            enable_prefix_caching=False,
        ),
    )
    sampling = glm_jax.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    requests = [engine.submit(case.ids, sampling) for case in cases]
    engine.run_until_idle()
    found = []
    for case, request in zip(cases, requests, strict=True):
        entries = request.prompt_logprobs[case.start : case.stop]
        found += [-entry.logprob for entry in entries if entry is not None]
    return np.array(found)


def row(name: str, value: float, target: float | None = None, error: float | None = None) -> dict[str, Any]:
    """`error`: the standard error of the mean."""
    made = {"name": name, "value": value, "unit": "nats/token", "better": "lower", "target": target}
    made |= {"error": error, "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    made["date"] = datetime.date.today().isoformat()
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in made.items() if v is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--cases", type=int, default=32, help="of each kind")
    parser.add_argument("--shots", type=int, default=20, help="solved problems in front of each")
    parser.add_argument("--recall-tokens", type=int, default=1000, help="length of the recall prompts")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results file")
    args = parser.parse_args()
    model = glm_jax.load(args.model, dtype="float32")
    if model.tokenizer is None:
        raise SystemExit("the checkpoint has no tokenizer: its cases cannot be written")
    encode, r = model.tokenizer.encode, random.Random(SEED)
    kinds = {
        "word problems": [problem_case(r, encode, args.shots) for _ in range(args.cases)],
        "recall": [recall_case(r, encode, args.recall_tokens) for _ in range(args.cases)],
    }
    rows = []
    for kind, cases in kinds.items():
        found = {name: losses(model, cases, dtype) for name, dtype in LATENTS.items()}
        for name, values in found.items():
            rows.append(row(f"NLL of answers, {kind}, {name} latents", float(values.mean())))
        cost = found["fp8"] - found["bfloat16"]
        error = float(cost.std() / np.sqrt(len(cost)))
        name = f"NLL that fp8 latents cost over bfloat16, {kind}"
        rows.append(row(name, float(cost.mean()), MOST_FP8_COST, error))
    print(table(rows))
    print(write(rows, "latent-precision", args.results))


if __name__ == "__main__":
    main()
