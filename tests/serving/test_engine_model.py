"""The engine on a real, random model, its unused memory NaN: answers are what teacher forcing predicts."""

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import glm_jax
from glm_jax.parameter_init import init
from glm_jax.sampling_params import MOST_LOGPROBS, SamplingParams
from serving.engine import Engine
from serving.engine_config import EngineConfig
from serving.memory_plan import geometry
from serving.model_runner import ModelRunner
from tests.serving.tiny_text import TOKENIZER, config

BLOCKS, STATE_SLOTS = 12, 10
LIMITS = EngineConfig(
    max_num_seqs=2,
    max_num_batched_tokens=24,
    block_size=8,
    snapshot_spacing=16,
    num_gpu_blocks_override=BLOCKS,
    num_state_slots_override=STATE_SLOTS,
    max_model_len=80,
)
LENGTHS = (1, 7, 20, 50, 33, 3)
ANSWER = 9
# Differences of summation order between the cached and the whole-sequence form, relative to the largest
# logit.
NEAR = 2e-5


@pytest.fixture(scope="module")
def model() -> SimpleNamespace:
    made = config()
    return SimpleNamespace(config=made, params=init(made, jax.random.key(3)), tokenizer=TOKENIZER)


@pytest.fixture(scope="module")
def engine(model: SimpleNamespace) -> Engine:
    sizes = geometry(model.params, LIMITS, BLOCKS, STATE_SLOTS)
    runner = ModelRunner(model.params, model.config, sizes, top_logprobs=MOST_LOGPROBS, fill=math.nan)
    made = Engine(model, LIMITS, runner=runner)
    made.warm_up()
    return made


def test_batched_and_chunked_answers_are_the_models(engine: Engine, model: SimpleNamespace) -> None:
    random = np.random.default_rng(0)
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    requests = [engine.submit(random.integers(0, 300, n).tolist(), sampling) for n in LENGTHS]
    engine.run_until_idle()
    longest = max(LENGTHS) + ANSWER
    rows = [request.prompt_token_ids + request.token_ids for request in requests]
    tokens = np.array([row + [0] * (longest - len(row)) for row in rows], np.int32)
    mask = np.array([[True] * len(row) + [False] * (longest - len(row)) for row in rows])
    logits = np.asarray(glm_jax.forward(model.params, model.config, tokens, mask))
    for row, request in enumerate(requests):
        assert len(request.token_ids) == ANSWER
        for step, token in enumerate(request.token_ids):
            scores = logits[row, len(request.prompt_token_ids) + step - 1]
            assert scores.max() - scores[token] <= NEAR * np.abs(scores).max(), (row, step)
    stats = engine.stats()
    assert stats["free_blocks"] == BLOCKS and stats["free_state_slots"] == STATE_SLOTS


def test_sampled_answers_depend_on_the_request_alone(engine: Engine) -> None:
    sampling = SamplingParams(temperature=1.5, top_p=0.9, seed=11, n=2, max_tokens=8, ignore_eos=True)
    alone = engine.submit([5, 6, 7], sampling)
    engine.run_until_idle()
    crowd = [engine.submit([i] * (10 + i), SamplingParams(max_tokens=5, ignore_eos=True)) for i in range(3)]
    again = engine.submit([5, 6, 7], sampling)
    engine.run_until_idle()
    answers = [answer.token_ids for answer in again.answers]
    assert answers == [answer.token_ids for answer in alone.answers]
    assert answers[0] != answers[1]
    assert all(len(request.token_ids) == 5 for request in crowd)


def test_nothing_compiles_after_warm_up(engine: Engine) -> None:
    compiled: list[float] = []

    def count(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(count)
    for length in (2, 30):
        engine.submit([9] * length, SamplingParams(max_tokens=4))
    engine.run_until_idle()
    assert not compiled
