"""Random lives of an engine over the fake device: whatever happens, answers equal their definition.

The device fails on any read of a stale, foreign or missing cache row or state, so this holds every rule of
the cache at once, thousands of operations in seconds; `tests/float64/test_engine.py` does the same with the
real model. `GLM_JAX_FUZZ_LIVES` lengthens it (`make fuzz`).
"""

import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm_jax.sampling_params import SamplingParams
from serving.engine import Engine
from serving.engine_config import EngineConfig
from serving.request import Request
from tests.serving.cache_audit import audit
from tests.serving.fake_device import FakeDevice, answer_to
from tests.serving.tiny_text import weightless_model

CONTEXT = 96
LIVES = int(os.environ.get("GLM_JAX_FUZZ_LIVES", "60"))


def make(chance: random.Random) -> tuple[Engine, FakeDevice]:
    drafts = chance.choice([0, 1, 3])
    block = chance.choice([8, 16])
    seqs = chance.randint(1, 5)
    caching = chance.random() < 0.85
    limits: dict[str, Any] = {
        "max_model_len": CONTEXT,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": chance.randint(seqs * (drafts + 1), 80),
        "num_gpu_blocks_override": -(-CONTEXT // block) + chance.choice([0, 1, 4, 40]),
        "num_state_slots_override": (3 if caching else 1) * seqs + chance.choice([0, 1, 3, 30]),
        "block_size": block,
        "snapshot_spacing": block * chance.choice([1, 2, 4]),
        "enable_prefix_caching": caching,
        "async_scheduling": chance.random() < 0.7,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None,
    }
    device = FakeDevice(block, drafts=drafts, right=chance.random(), seed=chance.randrange(2**30))
    model = weightless_model(num_mtp_layers=1, eos_token_ids=(96,))
    return Engine(model, EngineConfig(**limits), runner=device), device


def prompt(chance: random.Random, submitted: list[Request]) -> list[int]:
    """Often a continuation of what an earlier request said or asked, cut anywhere."""
    old: list[int] = []
    if submitted and chance.random() < 0.7:
        request = chance.choice(submitted)
        old = request.prompt_token_ids + chance.choice(request.answers).token_ids
        old = old[: chance.choice([len(old), chance.randint(0, len(old))])]
    new = [chance.randrange(3) for _ in range(chance.choice([0, 1, 2, 7, 8, 9, 30]))]
    return (old + new)[: CONTEXT - 1] or [1]


def check(engine: Engine) -> None:
    engine._cache.blocks.check()
    engine._cache.states.check()
    scheduler = engine._scheduler
    places = [a.placement for a in scheduler.running] + [place for _, place, _ in scheduler._closing]
    held = [slot for place in places if place for slot in (place.state_slot, *place.rolling)]
    assert len(set(held)) == len(held)
    assert set(held) == engine._cache.states._owned
    references = [block for place in places if place for block in place.blocks]
    assert sum(engine._cache.blocks._references) == len(references)


def expected(request: Request, index: int) -> tuple[list[int], str]:
    sampling = request.sampling
    room = CONTEXT - len(request.prompt)
    count = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
    seed = 0 if sampling.greedy else request.seed + 1
    tokens = answer_to(request.prompt_token_ids, count, seed=seed + index)
    if not sampling.ignore_eos and 96 in tokens:
        return tokens[: tokens.index(96) + 1], "stop"
    return tokens, "length"


def live(seed: int, operations: int) -> Engine:
    chance = random.Random(seed)
    engine, device = make(chance)
    submitted: list[Request] = []
    aborted: set[int] = set()
    for _ in range(operations):
        action = chance.random()
        if action < 0.3 and len(engine._scheduler.waiting) < 8:
            choices = chance.choice([1, 1, 1, 3])
            sampling = SamplingParams(
                n=choices,
                temperature=1.0 if choices > 1 else chance.choice([0.0, 1.0]),
                max_tokens=chance.choice([None, 1, 2, 5, 20]),
                ignore_eos=chance.random() < 0.5,
                seed=chance.randrange(100),
            )
            salt = chance.choice(["", "", "", "another"])
            submitted.append(
                engine.submit(
                    prompt(chance, submitted), sampling, priority=chance.choice([0, 0, 1]), cache_salt=salt
                )
            )
        elif action < 0.34 and submitted:
            victim = chance.choice(submitted)
            if not victim.finished:
                aborted.add(id(victim))
            engine.abort(victim)
        elif action < 0.36:
            engine.reset_prefix_cache()
        elif action < 0.38 and engine._scheduler.running and not engine._unread:
            engine._scheduler.preempt(chance.choice(engine._scheduler.running))
        else:
            engine.step()
        check(engine)
        if chance.random() < 0.1:
            audit(engine, device, (request.root for request in submitted))
    engine.run_until_idle()
    check(engine)
    audit(engine, device, (request.root for request in submitted))
    for request in submitted:
        for answer in request.answers:
            tokens, reason = expected(request, answer.index)
            if id(request) in aborted and answer.finish_reason == "abort":
                assert answer.token_ids == tokens[: len(answer.token_ids)]
            else:
                assert (answer.token_ids, answer.finish_reason) == (tokens, reason)
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == 0
    assert stats["free_blocks"] == stats["total_blocks"]
    assert stats["free_state_slots"] == stats["total_state_slots"]
    assert engine.reset_prefix_cache()
    assert engine.stats()["cached_blocks"] == engine.stats()["cached_snapshots"] == 0
    return engine


@settings(max_examples=LIVES, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**31))
def test_any_life(seed: int) -> None:
    live(seed, 150)


def test_the_lives_do_what_they_are_for() -> None:
    """Every mechanism happens somewhere in them, or the test above shows nothing."""
    total: dict[str, float] = {}
    for seed in range(30):
        for name, count in live(seed, 150).stats().items():
            total[name] = total.get(name, 0) + count
    for name in (
        "preemptions", "prefix_cache_hits", "block_evictions", "snapshot_evictions", "accepted_draft_tokens"
    ):  # fmt: skip
        assert total[name] > 50, (name, total)
    assert total["draft_tokens"] > total["accepted_draft_tokens"]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("ahead", [False, True])
def test_hit_rates(drafts: int, ahead: bool) -> None:
    """Issue figures: a long prompt asked twice, and a shared prefix of 27 blocks under unique tails."""

    def engine() -> Engine:
        config = EngineConfig(
            max_num_seqs=4, max_num_batched_tokens=2048, async_scheduling=ahead,
            speculative_config={"method": "mtp", "num_speculative_tokens": drafts} if drafts else None,
        )  # fmt: skip
        model = weightless_model(num_mtp_layers=1, max_position_embeddings=8192)
        return Engine(model, config, runner=FakeDevice(64, drafts=drafts))

    chance = random.Random(1)
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    made = engine()
    prompts = [[chance.randrange(300) for _ in range(350)] for _ in range(3)]
    for _ in range(2):
        asked = [made.submit(p, greedy) for p in prompts]
        made.run_until_idle()
    assert all(request.cached_tokens["device"] == 320 for request in asked)

    made = engine()
    shared = [chance.randrange(300) for _ in range(27 * 64)]
    hits = []
    for _ in range(3):
        request = made.submit(shared + [chance.randrange(300) for _ in range(100)], greedy)
        made.run_until_idle()
        hits.append(request.cached_tokens["device"])
    assert hits[0] == 0
    assert hits[2] == 27 * 64


def test_a_chat_resumes_behind_its_last_answer() -> None:
    made = Engine(
        weightless_model(num_mtp_layers=1), EngineConfig(block_size=8, snapshot_spacing=64),
        runner=FakeDevice(8),
    )  # fmt: skip
    conversation: list[int] = [5] * 30
    known = 0
    for _ in range(4):
        request = made.submit(conversation, SamplingParams(temperature=0, max_tokens=21, ignore_eos=True))
        made.run_until_idle()
        if known:
            # everything of the last turn but its last partial block, and the token that was drawn last
            assert request.cached_tokens["device"] == (known - 1) // 8 * 8
        known = len(conversation) + 21
        conversation = conversation + request.token_ids + [7] * 3


def test_nan_logits_fail_one_request_alone() -> None:
    device = FakeDevice(8)
    made = Engine(weightless_model(), EngineConfig(block_size=8), runner=device)
    prompts = [[1, 2, 3, *range(20)], [4, 5]]
    device.sick = {answer_to(prompts[0], 4)[3]} - set(answer_to(prompts[1], 6))
    bad, good = (made.submit(p, SamplingParams(temperature=0, max_tokens=6)) for p in prompts)
    made.run_until_idle()
    assert (bad.finish_reason, bad.token_ids) == ("error", answer_to(prompts[0], 3))
    assert (good.finish_reason, good.token_ids) == ("length", answer_to(prompts[1], 6))
    assert made.stats()["nan_logits"] == 1
    device.sick = set()
    again = made.submit(prompts[0], SamplingParams(temperature=0, max_tokens=6))
    made.run_until_idle()
    assert again.cached_tokens["device"] == 0 and again.finish_reason == "length"
