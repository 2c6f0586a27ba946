"""Which boundaries keep a state, and what becomes of states whose blocks are gone."""

import pytest

from glm_jax.sampling_params import SamplingParams
from serving.block_pool import BlockPool
from serving.prefix_cache import NO_MATCH, Match, PrefixCache
from serving.state_pool import StatePool
from tests.serving.cache_audit import audit
from tests.serving.fake_device import answer_to
from tests.serving.test_edges import WAYS, made_for, run
from tests.serving.test_engine import GREEDY, engine
from tests.serving.tiny_text import TOKENIZER


@pytest.mark.parametrize(
    ("start", "target", "chained", "expected"),
    [
        (0, 7, 0, []),
        (0, 8, 0, [(8, False)]),  # itself: the next turn of a chat resumes there
        (0, 9, 0, [(8, False)]),  # the deepest that leaves a token to run
        (0, 100, 0, [(32, True), (64, True), (96, False)]),  # both regular and deepest: kept for longer
        (0, 104, 0, [(32, True), (64, True), (96, False), (104, False)]),
        (0, 50, 24, [(24, False), (32, True), (48, False)]),  # where this prompt left a cached one
        (32, 50, 40, [(40, False), (48, False)]),  # nothing below the resume point
        (48, 50, 48, []),
        (40, 64, 40, [(56, False), (64, False)]),
    ],
)
def test_boundaries_that_keep_a_state(start: int, target: int, chained: int, expected: list) -> None:
    cache = PrefixCache(BlockPool(1), StatePool(1), 8, spacing=32)
    match = Match(start, (), -1, chained) if start or chained else NO_MATCH
    assert list(cache.snapshot_boundaries(start, target, match)) == expected


def test_a_branch_is_hit_by_the_third_request() -> None:
    """The first one's state lies too deep; the second one leaves it at the branch and keeps a state there."""
    made, _ = engine()
    hits = []
    for tail in (50, 60, 70):
        request = made.submit([*range(30), *[tail] * 30], GREEDY)
        run(made)
        hits.append(request.cached_tokens["device"])
    assert hits == [0, 0, 24]


def test_a_prompt_that_ends_on_a_boundary_is_resumed_there() -> None:
    made, _ = engine()
    made.submit(list(range(24)), SamplingParams(temperature=0, max_tokens=1))
    run(made)
    request = made.submit([*range(24), 90, 91], GREEDY)
    run(made)
    assert request.cached_tokens["device"] == 24


def test_snapshots_go_with_their_blocks() -> None:
    """No chain leads to a state whose block was evicted: its slot serves others."""
    made, _ = engine(num_gpu_blocks_override=8, max_model_len=64, snapshot_spacing=8)
    for first in range(6):
        made.submit([first, *range(40)], GREEDY)
        run(made)
        cache = made._cache
        for content in (*cache.states._kept, *cache.states._regular):
            assert cache.blocks.find(content) is not None
    assert made.stats()["block_evictions"] > 10
    assert 0 < made.stats()["cached_snapshots"] <= 8


def test_nothing_of_a_failed_request_is_kept() -> None:
    made, device = engine(snapshot_spacing=8)
    prompt = list(range(20))
    device.sick = {answer_to(prompt, 12)[11]}
    request = made.submit(prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    run(made)
    assert request.finish_reason == "error"
    assert made.stats()["cached_blocks"] == made.stats()["cached_snapshots"] == 0


@pytest.mark.parametrize(("drafts", "ahead"), WAYS)
def test_what_lies_past_an_answers_end_is_never_kept(drafts: int, ahead: bool) -> None:
    """Windows that reach across the end and across a boundary, ends at every place around boundaries."""
    for length in range(1, 17):
        for count in range(1, 13):
            said = [60 + i for i in range(count - 1)] + TOKENIZER.encode("\n") + [61] * 30

            def next_token(tokens: tuple, _: int, length: int = length, said: list = said) -> int:
                return said[len(tokens) - length]

            made, device = made_for(drafts, ahead, next_token, max_num_seqs=1, max_model_len=64)
            sampling = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=TOKENIZER.encode("\n"))
            request = made.submit([1] * length, sampling)
            while made.has_work:
                made.step()
                audit(made, device, [request.root])
            assert request.token_ids == said[:count]


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_preempted_answer_resumes_at_its_last_boundary(drafts: int) -> None:
    """All of prompt and answer below the boundary that its windows crossed last is read, not computed."""
    made, device = made_for(drafts, False, trace_requests=True)
    request = made.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    while len(request.token_ids) < 25:
        made.step()
    known = 3 + len(request.token_ids)
    made._scheduler.preempt(request.answers[0])
    audit(made, device, [request.root])
    run(made)
    assert request.token_ids == answer_to([1, 2, 3], 40)
    assert request.trace is not None
    (hit,) = [event.details["hit"] for event in request.trace.events if event.what == "resumed"]
    # the last window's own tokens are committed by the next one's replay
    assert hit == (known - 1 - (drafts + 1)) // 8 * 8 == 16 + 8 * (drafts == 0)
