"""The engine with the real model, in float64: every run gives the tokens of a plain one.

A plain run is the same engine and dtypes, one request alone, no prefix cache, no drafts, the prompt in one
chunk. Unused memory is NaN throughout, and pools are made tiny by withholding blocks on the host, so that no
mechanism changes a shape. `GLM_JAX_FUZZ_LIVES` lengthens it (`make fuzz`).
"""

import functools
import os
import random

import jax
import numpy as np
import pytest

from glm_jax import compiled_steps
from glm_jax.sampling_params import SamplingParams
from serving.engine import Engine
from serving.engine_config import EngineConfig
from serving.memory_plan import geometry
from serving.model_runner import ModelRunner
from serving.request import Request
from tests.random_models import random_params, small_config

LIVES = int(os.environ.get("GLM_JAX_FUZZ_LIVES", "3"))
OPERATIONS = 60
CONTEXT = 128
BLOCKS = 24
STATE_SLOTS = 16


class Model:
    """Four layers of every kind; the MTP layer's drafts are mostly wrong, being random."""

    tokenizer = None

    def __init__(self) -> None:
        self.config = small_config(
            num_hidden_layers=4, layer_types=["linear_attention", "indexed_attention"] * 2,
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
            indexer_types=["full", "full", "full", "shared"], vocab_size=32, max_position_embeddings=CONTEXT,
        )  # fmt: skip
        self.params = random_params(self.config, dtype="float64")


@functools.cache
def model() -> Model:
    return Model()


def make(*, drafts: int = 0, blocks: int = BLOCKS, **changes: object) -> Engine:
    limits = {
        "max_model_len": CONTEXT, "max_num_seqs": 3, "max_num_batched_tokens": 64, "block_size": 16,
        "snapshot_spacing": 32, "num_gpu_blocks_override": BLOCKS, "num_state_slots_override": STATE_SLOTS,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": drafts}, **changes,
    }  # fmt: skip
    config = EngineConfig(**limits)
    runner = ModelRunner(
        model().params, model().config, geometry(model().params, config, BLOCKS, STATE_SLOTS),
        top_logprobs=20, fill=float("nan"),
    )  # fmt: skip
    engine = Engine(model(), config, runner=runner)
    withheld = engine._cache.blocks.take(BLOCKS - blocks)
    assert withheld is not None
    return engine


_plain_answers: dict[tuple, list[int]] = {}


def plain(request: Request, index: int) -> list[int]:
    """The answer of a plain run; runs are kept, since one prompt comes back often."""
    sampling = request.sampling
    key = (tuple(request.prompt_token_ids), sampling.temperature, request.seed, index, len(request.answers))
    if key not in _plain_answers:
        engine = _plain_engine()
        one = SamplingParams(
            temperature=sampling.temperature, seed=request.seed, max_tokens=24, ignore_eos=True,
            top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p,
        )  # fmt: skip
        again = engine.prepare(request.prompt_token_ids, one)
        again.answers[0].index = index
        engine.add(again)
        engine.run_until_idle()
        _plain_answers[key] = again.token_ids
    return _plain_answers[key]


@functools.cache
def _plain_engine() -> Engine:
    return make(enable_prefix_caching=False, async_scheduling=False, max_num_batched_tokens=128)


def prompt(chance: random.Random, submitted: list[Request]) -> list[int]:
    old: list[int] = []
    if submitted and chance.random() < 0.8:
        request = chance.choice(submitted)
        old = request.prompt_token_ids + chance.choice(request.answers).token_ids
        old = old[: chance.choice([len(old), chance.randint(0, len(old))])]
    new = [chance.randrange(32) for _ in range(chance.choice([0, 1, 2, 3, 15, 16, 17, 33]))]
    return (old + new)[:100] or [1]


def check(engine: Engine) -> None:
    engine._cache.blocks.check()
    engine._cache.states.check()


@pytest.mark.parametrize("life", range(LIVES))
def test_any_life(life: int) -> None:
    chance = random.Random(life)
    engine = make(
        drafts=[3, 0, 1][life % 3],
        blocks=chance.choice([8, 11, BLOCKS]),
        async_scheduling=chance.random() < 0.7,
    )
    submitted: list[Request] = []
    for _ in range(OPERATIONS):
        action = chance.random()
        if action < 0.25 and len(engine._scheduler.waiting) < 6:
            several = chance.random() < 0.2
            sampling = SamplingParams(
                n=2 if several else 1,
                temperature=1.0 if several else chance.choice([0.0, 1.0]),
                seed=chance.randrange(3),
                max_tokens=chance.choice([1, 2, 9, 24]),
                ignore_eos=True,
            )
            submitted.append(engine.submit(prompt(chance, submitted), sampling))
        elif action < 0.28 and submitted:
            engine.abort(chance.choice(submitted))
        elif action < 0.30:
            engine.reset_prefix_cache()
        elif action < 0.33 and engine._scheduler.running and not engine._unread:
            engine._scheduler.preempt(chance.choice(engine._scheduler.running))
        else:
            engine.step()
        check(engine)
    engine.run_until_idle()
    for request in submitted:
        for answer in request.answers:
            expected = plain(request, answer.index)[: request.sampling.max_tokens]
            if answer.finish_reason == "abort":
                expected = expected[: len(answer.token_ids)]
            assert answer.token_ids == expected, (life, request.prompt_token_ids, answer.index)
    assert engine.stats()["nan_logits"] == 0
    print({k: v for k, v in engine.stats().items() if v})


def test_every_program_compiles_once_and_nothing_compiles_after_warm_up() -> None:
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compiled.append(event) if "backend_compile" in event else None
    )
    jax.clear_caches()  # another test may have run the same programs
    compiled_steps._single_device.cache_clear()
    engine = make(drafts=1)
    prefills, decodes = engine.padding_batches()
    compiled.clear()
    engine._runner.compile(prefills, decodes)
    ahead = len(compiled)
    assert ahead >= len(prefills) + len(decodes)
    for batch in prefills:
        engine._runner.prefill(batch)
    for batch in decodes:
        engine._runner.decode(batch)
    assert len(compiled) == ahead  # programs compiled ahead are those that run
    engine.warm_up()
    compiled.clear()
    sampling = SamplingParams(
        temperature=1.0, seed=1, max_tokens=20, ignore_eos=True, logprobs=3, prompt_logprobs=2,
        presence_penalty=0.5, min_tokens=3, logit_bias={3: 2.0}, top_p=0.9, top_k=20, min_p=0.01,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    for length in (1, 16, 40, 70, 100):
        engine.submit(rng.integers(0, 32, length).tolist(), sampling)
        engine.submit(
            rng.integers(0, 32, length).tolist(), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        )
    engine.run_until_idle()
    assert compiled == []
