"""The engine's rules with the real model in float64, its unused memory NaN: `tests/serving/test_rules.py` has
the same rules over the fake device. Engines are those of `test_engine.py`, and so are the compiled programs.
"""

import jax
import numpy as np
import pytest

from glm_jax.sampling_params import SamplingParams
from serving.engine import Engine
from serving.request import Request
from tests.float64.test_engine import CONTEXT, make, model

EOS = 1
NEAR = 1e-9  # sums in another order, in float64, on values of order one
LOGPROB = 2e-6  # log-probabilities are reported in float32


def tokens(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, 32, length).tolist()


def alone(prompt: list[int], sampling: SamplingParams) -> Request:
    """A plain run: no cache, no drafts, one chunk, nobody beside it."""
    engine = make(enable_prefix_caching=False, async_scheduling=False, max_num_batched_tokens=128)
    request = engine.submit(prompt, sampling)
    engine.run_until_idle()
    return request


def settle(engine: Engine) -> None:
    while engine._unread:
        engine._read(engine._unread.popleft())


SAMPLINGS = {
    "penalties": {
        "temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3,
    },
    "filters and bias": {
        "temperature": 1.2, "seed": 4, "top_k": 12, "top_p": 0.9, "min_p": 0.01, "logit_bias": {7: 1.5},
        "frequency_penalty": 0.2,
    },
    "allowed tokens": {"temperature": 1.0, "seed": 9, "allowed_token_ids": [3, 4, 5, 6, 7, 8]},
}  # fmt: skip


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_rule_1_sampling_survives_drafts_hits_chunks_and_preemption(kind: str) -> None:
    """Penalty counts at a drafted position include the drafts before it, and are rebuilt on resuming."""
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=3, **SAMPLINGS[kind])
    prompt = tokens(45, 1)
    plain = alone(prompt, sampling)
    engine = make(drafts=3)
    engine.submit(prompt[:40], SamplingParams(temperature=0, max_tokens=1))
    engine.run_until_idle()
    others = [engine.submit(tokens(n, n), SamplingParams(max_tokens=20, seed=n)) for n in (50, 9)]
    request = engine.submit(prompt, sampling)
    while len(request.token_ids) < 8:
        engine.step()
    settle(engine)
    engine._scheduler.preempt(request.answers[0])
    engine.run_until_idle()
    assert request.token_ids == plain.token_ids
    assert request.cached_tokens["device"] == 32 and request.answers[0].preemptions == 1
    assert [e.token_id for e in request.logprobs] == request.token_ids
    for got, want in zip(request.logprobs, plain.logprobs, strict=True):
        assert (got.rank, [i for i, _ in got.top]) == (want.rank, [i for i, _ in want.top])
        assert abs(got.logprob - want.logprob) < LOGPROB
    assert all(other.finished for other in others)


@pytest.mark.parametrize("drafts", [0, 3])
def test_an_answer_has_its_least_tokens(drafts: int) -> None:
    """The end token is by far the likeliest everywhere: it stands where it may first, not inside a window
    before that."""
    engine = make(drafts=drafts)
    for least in (0, 1, 5, 6):
        request = engine.submit(
            tokens(9), SamplingParams(temperature=0, max_tokens=20, min_tokens=least, logit_bias={EOS: 100.0})
        )
        engine.run_until_idle()
        assert (len(request.token_ids), request.finish_reason) == (least + 1, "stop")
        assert request.token_ids[-1] == EOS and EOS not in request.token_ids[:-1]


def leg_rows(engine: Engine, request: Request, blocks: int) -> dict[str, np.ndarray]:
    """Every leg of the request's first published blocks and of the snapshot behind them."""
    cache = engine._runner._cache
    chain = engine._cache.hashes(request.answers[0], blocks)
    ids = [engine._cache.blocks.find(content) for content in chain]
    slot = engine._cache.states.find(chain[-1])
    assert None not in ids and slot is not None
    at = np.array(ids, np.int32)
    history = model().config.conv_kernel - 1
    kinds = [kind for kind in model().config.indexer_kinds if kind is not None]
    own = np.array(
        [i for i, kind in enumerate([*kinds, "full"]) if kind == "full"]
    )  # the others write no keys
    return {
        "latents": np.asarray(cache.latents[:, at]),  # the MTP layer's are the last
        "pooled": np.asarray(cache.pooled[own][:, at]),
        "state": np.asarray(cache.kda_state[:, slot]),
        "conv": np.asarray(cache.conv[:, slot, :history]),
    }


def test_rules_2_and_4_decoding_leaves_what_prefill_would() -> None:
    """PITFALLS B01, B06, B09: after an answer with mostly wrong drafts, in a batch of three, every leg of its
    blocks (the MTP layer's included) and its last state are those of a prompt that was never drafted."""
    engine = make(drafts=3)
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=46, ignore_eos=True)
    asked = [engine.submit(tokens(n, n), sampling) for n in (5, 22, 35)]
    engine.run_until_idle()
    stats = engine.stats()
    assert 0 < stats["accepted_draft_tokens"] < stats["draft_tokens"]
    other = make(drafts=3)
    for request in asked:
        known = request.prompt_token_ids + request.token_ids
        blocks = (len(known) - 1) // 16
        again = other.submit(known, SamplingParams(temperature=0, max_tokens=1))
        other.run_until_idle()
        got, want = leg_rows(engine, request, blocks), leg_rows(other, again, blocks)
        for leg, values in want.items():
            assert np.isfinite(values).all() and np.isfinite(got[leg]).all(), leg
            assert np.abs(got[leg] - values).max() < NEAR, leg


def test_rule_2_a_missing_state_shortens_the_hit() -> None:
    """PITFALLS B14: blocks are cached up to 48, the state only at 32, and everything unused is NaN."""
    engine = make(drafts=3)
    prompt = tokens(50, 2)
    sampling = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    first = engine.submit(prompt, sampling)
    engine.run_until_idle()
    engine._cache.states.drop(engine._cache.hashes(first.answers[0], 3)[-1])
    again = engine.submit(prompt, sampling)
    engine.run_until_idle()
    assert again.cached_tokens["device"] == 32
    assert again.token_ids == first.token_ids == alone(prompt, sampling).token_ids


def test_rule_5_padding_writes_nothing() -> None:
    """Every program run on padding alone leaves a cache of NaN a cache of NaN."""
    engine = make(drafts=3)
    engine.warm_up()
    cache = engine._runner._cache
    tables = cache.sampler
    for leaf in jax.tree.leaves(cache.replace(sampler=None)):
        values = np.asarray(leaf)
        assert np.isnan(values).all() if np.issubdtype(values.dtype, np.floating) else not values.any()
    assert not np.asarray(tables.counts).any()


def test_rule_6_short_requests_on_used_slots() -> None:
    """PITFALLS B16: three rows used over and over by shorter requests, some aborted with steps in flight."""
    engine = make(drafts=3)
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for length in (90, 33, 3, 1):
        gone = [engine.submit(tokens(length, 100 + i), sampling) for i in range(3)]
        for _ in range(2):
            engine.step()
        for request in gone:
            engine.abort(request)
        request = engine.submit(tokens(length, length), sampling)
        engine.run_until_idle()
        assert request.token_ids == alone(tokens(length, length), sampling).token_ids


def test_rule_7_future_tokens_change_nothing() -> None:
    """The prompts part after 30 tokens; what was said of the first 29 is bit-equal, at the same shapes."""
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5)
    said = []
    for seed in (5, 6):
        engine = make(drafts=3)
        request = engine.submit(tokens(30) + tokens(30, seed), sampling)
        engine.run_until_idle()
        said.append(request.prompt_logprobs)
    assert said[0][:30] == said[1][:30]
    assert said[0][30:] != said[1][30:]


def test_b24_neighbours_do_not_matter() -> None:
    """Lengths 3, 17 and 64 in one batch, chunked by the budget, against each alone in one chunk."""
    sampling = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0, logprobs=0, ignore_eos=True)
    engine = make(drafts=3)
    together = [engine.submit(tokens(n, n), sampling) for n in (64, 3, 17)]
    engine.run_until_idle()
    for request in together:
        plain = alone(request.prompt_token_ids, sampling)
        assert request.token_ids == plain.token_ids
        got = [e.logprob for e in (*request.prompt_logprobs[1:], *request.logprobs) if e]
        want = [e.logprob for e in (*plain.prompt_logprobs[1:], *plain.logprobs) if e]
        assert len(got) == len(want) == len(request.prompt) - 1 + 3
        assert np.abs(np.array(got) - want).max() < LOGPROB


def test_b39_the_end_of_the_context() -> None:
    """Seven tokens of room: exactly seven, with the log-probabilities of a run without drafts."""
    sampling = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, logprobs=2)
    prompt = tokens(CONTEXT - 7, 8)
    plain = alone(prompt, sampling)
    engine = make(drafts=3)
    request = engine.submit(prompt, sampling)
    engine.run_until_idle()
    assert (len(request.token_ids), request.finish_reason) == (7, "length")
    assert request.token_ids == plain.token_ids
    difference = [a.logprob - b.logprob for a, b in zip(request.logprobs, plain.logprobs, strict=True)]
    assert np.abs(difference).max() < LOGPROB
    assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]


def test_b18_a_poisoned_request_fails_alone() -> None:
    engine = make(drafts=3)
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    bad, good = (engine.submit(tokens(n, n), sampling) for n in (20, 33))
    while len(bad.token_ids) < 3 or len(good.token_ids) < 3:
        engine.step()
    place = bad.answers[0].placement
    assert place is not None
    cache = engine._runner._cache
    engine._runner._cache = cache.replace(
        kda_state=cache.kda_state.at[:, place.state_slot].set(float("nan"))
    )
    engine.run_until_idle()
    assert bad.finish_reason == "error" and len(bad.token_ids) < 20
    assert good.token_ids == alone(tokens(33, 33), sampling).token_ids
    assert engine.stats()["nan_logits"] == 1
    # nothing of it is cached: the same prompt starts over, and is answered
    again = engine.submit(tokens(20, 20), sampling)
    engine.run_until_idle()
    assert again.cached_tokens["device"] == 0
    assert again.token_ids == alone(tokens(20, 20), sampling).token_ids
