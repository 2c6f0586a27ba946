"""Run by `test_sharded_engine.py` in a process with two simulated devices: prints two engines' answers."""

import json

import jax
import numpy as np
from jax.sharding import AxisType

from glm_jax.params import Params
from glm_jax.sampling_params import SamplingParams
from glm_jax.sharding import TENSOR_PARALLEL, partition_specs
from serving.engine import Engine
from serving.engine_config import EngineConfig
from tests.random_models import random_params, small_config

CONTEXT = 96


class Model:
    tokenizer = None

    def __init__(self, params: Params) -> None:
        self.config = CONFIG
        self.params = params


CONFIG = small_config(
    num_hidden_layers=4, layer_types=["linear_attention", "indexed_attention"] * 2,
    mlp_layer_types=["dense", "sparse", "sparse", "sparse"], indexer_types=["full"] * 4, vocab_size=64,
    max_position_embeddings=CONTEXT,
)  # fmt: skip


def answers(params: Params) -> list[dict]:
    config = EngineConfig(
        max_num_seqs=2, max_num_batched_tokens=64, block_size=16, snapshot_spacing=32,
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
    )  # fmt: skip
    engine = Engine(Model(params), config)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 64, 40).tolist()
    plain = {"ignore_eos": True, "max_tokens": 12}
    asked = [
        SamplingParams(temperature=0, **plain),
        SamplingParams(temperature=1, seed=3, top_p=0.9, top_k=30, min_p=0.01, **plain),
        SamplingParams(temperature=1, seed=4, presence_penalty=1, logit_bias={5: 3.0}, logprobs=2, **plain),
        SamplingParams(temperature=0, allowed_token_ids=list(range(20, 60)), min_tokens=2, **plain),
    ]
    requests = [engine.submit(shared + rng.integers(0, 64, n).tolist(), s) for n, s in enumerate(asked, 1)]
    engine.run_until_idle()
    requests.append(engine.submit(requests[0].prompt_token_ids, asked[0]))
    engine.run_until_idle()
    return [
        {
            "tokens": r.token_ids,
            "cached": r.cached_tokens["device"],
            "logprobs": [round(entry.logprob, 4) for entry in r.logprobs],
        }
        for r in requests
    ]


def main() -> None:
    params = random_params(CONFIG, dtype="float64")
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    specs = partition_specs(CONFIG, params, TENSOR_PARALLEL)
    placed = jax.tree.map(lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec)), params, specs)
    print(json.dumps({"one": answers(params), "two": answers(placed)}))


if __name__ == "__main__":
    main()
