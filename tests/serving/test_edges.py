"""Where answers end and prompts begin, at every awkward place: inside a window, on a boundary, at a limit.

Over the fake device, whose drafts are all right here unless said otherwise, so that windows reach as far past
an end as they can.
"""

from typing import Any

import numpy as np
import pytest

from glm_jax.errors import RequestError
from glm_jax.sampling_params import SamplingParams
from serving.engine import Engine
from serving.errors import QueueFullError
from tests.serving.fake_device import FakeDevice, answer_to, hashed_token, logprob_of
from tests.serving.test_engine import GREEDY, assert_idle, engine, says
from tests.serving.tiny_text import EOS, TOKENIZER

WAYS = [(drafts, ahead) for drafts in (0, 1, 3) for ahead in (False, True)]
MOST_STEPS = 2000


def made_for(
    drafts: int, ahead: bool, next_token: Any = hashed_token, **limits: Any
) -> tuple[Engine, FakeDevice]:
    made, device = engine(next_token, drafts, async_scheduling=ahead, **limits)
    device.right = 1.0
    return made, device


def run(made: Engine) -> None:
    """Like `run_until_idle`, but an engine that gets nowhere fails instead of hanging."""
    for _ in range(MOST_STEPS):
        if not made.has_work:
            return
        made.step()
    raise AssertionError(f"not idle after {MOST_STEPS} steps: {made.stats()}")


@pytest.mark.parametrize(("drafts", "ahead"), WAYS)
@pytest.mark.parametrize(
    ("said", "sampling", "text", "stop_reason", "count"),
    [
        ("ab.cdefgh", {"stop": ["."]}, "ab", ".", 3),
        ("abENDcdefgh", {"stop": ["END"]}, "ab", "END", 5),
        ("abENENDcdef", {"stop": ["END"]}, "abEN", "END", 7),
        ("ab.cd.efgh", {"stop": ["."], "min_tokens": 4}, "ab.cd", ".", 6),
        ("ab.cd", {"stop": ["."], "min_tokens": 3}, "ab.cd", None, 6),
        ("ab.cd.", {"stop": ["b.c"], "min_tokens": 3}, "a", "b.c", 4),
        ("abcdef", {"stop_token_ids": TOKENIZER.encode("c")}, "ab", TOKENIZER.encode("c")[0], 3),
        ("a", {}, "a", None, 2),
        ("", {}, "", None, 1),
    ],
)
def test_stops_inside_a_window(
    drafts: int, ahead: bool, said: str, sampling: dict, text: str, stop_reason: object, count: int
) -> None:
    made, _ = made_for(drafts, ahead, says(said))
    request = made.submit("prompt", SamplingParams(temperature=0, max_tokens=50, logprobs=0, **sampling))
    tokens, shown = [], ""
    while made.has_work:
        for delta in made.step():
            tokens += delta.token_ids
            shown += delta.text
    assert (request.text, request.finish_reason, request.stop_reason) == (text, "stop", stop_reason)
    assert len(request.token_ids) == len(request.logprobs) == count
    assert (tokens, shown) == (request.token_ids, text)
    assert made.stats()["generation_tokens"] == count
    assert_idle(made)


@pytest.mark.parametrize(("drafts", "ahead"), WAYS)
def test_lengths_are_exact_inside_a_window(drafts: int, ahead: bool) -> None:
    for asked in range(1, 12):
        made, device = made_for(drafts, ahead, block_size=64)  # no boundary to commit at the end
        request = made.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=asked, ignore_eos=True))
        run(made)
        assert request.token_ids == answer_to([1, 2, 3], asked)
        assert request.finish_reason == "length"
        # the prompt's step, and a window for every 1 + drafts tokens after the first; at most one window was
        # ahead, and none where the count alone tells that the answer is over
        windows = -(-(asked - 1) // (drafts + 1))
        assert windows <= device.steps - 1 <= windows + (1 if ahead and drafts and asked > 1 else 0)
        assert_idle(made)


@pytest.mark.parametrize(("drafts", "ahead"), WAYS)
def test_the_context_ends_inside_a_window(drafts: int, ahead: bool) -> None:
    """PITFALLS B39: seven tokens of room, drafts that would reach past it."""
    for length in (1, 8, 9, 24, 25):
        blocks = -(-(length + 7) // 8)  # as many as the request can ever need
        made, _ = made_for(drafts, ahead, max_model_len=length + 7, num_gpu_blocks_override=blocks)
        prompt = list(range(length))
        request = made.submit(prompt, SamplingParams(temperature=0, max_tokens=None, logprobs=2))
        run(made)
        assert request.token_ids == answer_to(prompt, 7)
        assert request.finish_reason == "length"
        assert [entry.logprob for entry in request.logprobs] == [
            logprob_of(token, length - 1 + i) for i, token in enumerate(request.token_ids)
        ]
        assert made.stats()["preemptions"] == 0
        assert_idle(made)


@pytest.mark.parametrize(("drafts", "ahead"), WAYS)
def test_prompts_around_a_block(drafts: int, ahead: bool) -> None:
    """Asked twice: the second run reads every block it can, one token at least is run."""
    made, _ = made_for(drafts, ahead)
    for length in (1, 2, 7, 8, 9, 15, 16, 17, 23, 24, 25):
        prompt = [length, *range(length - 1)]
        for expected in (0, (length - 1) // 8 * 8):
            request = made.submit(prompt, GREEDY)
            run(made)
            assert request.token_ids == answer_to(prompt, 5)
            assert request.cached_tokens["device"] == expected, length
    assert_idle(made)


@pytest.mark.parametrize("seqs", [1, 2, 3, 4])
@pytest.mark.parametrize("caching", [False, True])
def test_several_answers_share_their_prompt_and_end(seqs: int, caching: bool) -> None:
    """Without prefix caching the pool holds one state an answer and no more, and all the same none waits for
    ever."""
    made, _ = made_for(1, True, enable_prefix_caching=caching, max_num_seqs=seqs)
    prompt = list(range(20))
    sampling = SamplingParams(n=3, seed=3, max_tokens=9, ignore_eos=True)
    first = made.submit(prompt, sampling)
    run(made)
    computed = made.stats()["prompt_tokens"]
    assert [answer.token_ids for answer in first.answers] == [
        answer_to(prompt, 9, seed=4 + index) for index in range(3)
    ]
    if seqs > 2 or caching:  # two slots are two running states: the third answer finds no snapshot any more
        assert computed == 20 + 4 + 4  # the first one's prompt, then what lies behind the boundary at 16
    again = made.submit(prompt, sampling)
    run(made)
    assert [a.token_ids for a in again.answers] == [a.token_ids for a in first.answers]
    assert again.cached_tokens["device"] == (16 if caching else 0)
    assert_idle(made)


def test_the_urgent_come_first_and_stay() -> None:
    made, _ = made_for(0, False, max_num_seqs=1)
    running = made.submit([1], GREEDY, priority=5)
    made.step()
    order = []
    waiting = {
        name: made.submit([2], GREEDY, priority=priority)
        for name, priority in (("late", 1), ("later", 1), ("first", 0), ("last", 2))
    }
    while made.has_work:
        for delta in made.step():
            if delta.finish_reason:
                order += [name for name, r in waiting.items() if delta.answer is r.answers[0]]
    assert running.finish_reason == "length"
    assert order == ["first", "late", "later", "last"]


def test_the_least_urgent_is_preempted() -> None:
    made, _ = made_for(0, False, num_gpu_blocks_override=5, max_model_len=40, max_num_seqs=2)
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    relaxed = made.submit([1] * 8, sampling, priority=1)
    made.step()
    urgent = made.submit([2] * 8, sampling, priority=0)
    run(made)
    assert (urgent.answers[0].preemptions, relaxed.answers[0].preemptions > 0) == (0, True)
    assert urgent.token_ids == answer_to([2] * 8, 24)
    assert relaxed.token_ids == answer_to([1] * 8, 24)


@pytest.mark.parametrize("drafts", [0, 3])
def test_abort_while_steps_are_in_flight(drafts: int) -> None:
    """Row, blocks and slots go to the next request while the device still runs the old one's window."""
    for steps in range(1, 6):
        made, _ = made_for(drafts, True, max_num_seqs=1, num_gpu_blocks_override=4, max_model_len=32)
        gone = made.submit(list(range(9)), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        for _ in range(steps):
            made.step()
        assert made._unread
        made.abort(gone)
        heard = len(gone.token_ids)
        following = made.submit([7] * 9, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        run(made)
        assert following.token_ids == answer_to([7] * 9, 20)
        assert (gone.finish_reason, len(gone.token_ids)) == ("abort", heard)
        assert gone.token_ids == answer_to(range(9), heard)
        assert_idle(made)


def test_reset_tells_the_truth() -> None:
    made, _ = made_for(0, True, max_num_seqs=1)
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompt = list(range(20))
    made.submit(prompt, sampling)
    made.submit(prompt, sampling)
    made.step()
    assert not made.reset_prefix_cache()  # one runs, one waits
    run(made)
    kept = made.submit(prompt, sampling)
    run(made)
    assert kept.cached_tokens["device"] == 16  # nothing was forgotten
    # a finished answer's last boundary is still to be committed: the reset waits for it, then forgets it too
    closing = made.submit(prompt[:5], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    while not closing.finished:
        made.step()
    assert made.has_work and not made.reset_prefix_cache(timeout_s=-1)
    assert made.reset_prefix_cache()
    assert not made.has_work
    assert made.stats()["cached_blocks"] == made.stats()["cached_snapshots"] == 0
    assert_idle(made)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_preempted_answers_penalties_go_on(drafts: int) -> None:
    made, device = made_for(drafts, False)
    sampling = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, frequency_penalty=0.5, logit_bias={5: 2.0}
    )
    request = made.submit([1, 2, 2], sampling)
    for _ in range(4):
        made.step()
    known = list(request.token_ids)
    made._scheduler.preempt(request.answers[0])
    run(made)
    (_, first), (row, resumed) = device.tables
    assert row == 0
    assert np.flatnonzero(first.prompt).tolist() == [1, 2]
    assert int(first.counts.sum()) == 0
    assert np.array_equal(resumed.counts, np.bincount(known, minlength=300))
    assert np.array_equal(resumed.prompt, first.prompt) and np.array_equal(resumed.bias, first.bias)
    assert first.bias[5] == 2 and np.count_nonzero(first.bias) == 1
    assert request.token_ids == answer_to([1, 2, 2], 30)


def test_a_resumed_answers_penalties_start_behind_a_hit() -> None:
    """The tables are written with the first chunk, wherever a hit lets it begin."""
    made, device = made_for(0, False)
    prompt = list(range(20))
    for _ in range(2):
        request = made.submit(
            prompt, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, presence_penalty=1.0)
        )
        run(made)
    assert request.cached_tokens["device"] == 16
    assert len(device.tables) == 2
    assert np.flatnonzero(device.tables[1][1].prompt).tolist() == prompt


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("choices", [1, 2])
def test_prompt_logprobs_in_chunks_and_after_preemption(drafts: int, choices: int) -> None:
    made, _ = made_for(drafts, True, max_num_batched_tokens=16)
    prompt = [3, *range(40)]
    made.submit(prompt, GREEDY)
    run(made)
    sampling = SamplingParams(
        n=choices, seed=1, max_tokens=20, ignore_eos=True, prompt_logprobs=2, logprobs=1
    )
    crowd = made.submit([9] * 30, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    request = made.submit(prompt, sampling)
    while len(request.token_ids) < 5:
        made.step()
    while made._unread:
        made._read(made._unread.popleft())
    made._scheduler.preempt(request.answers[0])
    run(made)
    assert request.answers[0].preemptions == 1
    assert request.cached_tokens["device"] == 0  # every prompt token is run
    assert request.prompt_logprobs[0] is None
    assert [(e.token_id, e.logprob) for e in request.prompt_logprobs[1:] if e] == [
        (token, logprob_of(token, i)) for i, token in enumerate(prompt[1:])
    ]
    for index, answer in enumerate(request.answers):
        assert answer.token_ids == answer_to(prompt, 20, seed=2 + index)
        assert [(e.token_id, e.logprob, len(e.top)) for e in answer.logprobs] == [
            (token, logprob_of(token, 40 + i), 1) for i, token in enumerate(answer.token_ids)
        ]
    assert crowd.token_ids == answer_to([9] * 30, 30)


def test_prompt_logprobs_of_two_requests_in_one_step() -> None:
    made, _ = made_for(0, False)
    asked = [
        made.submit([i, i + 1, *range(i)], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
        for i in (3, 7, 1)
    ]
    run(made)
    for request in asked:
        entries = request.prompt_logprobs
        assert [e and e.logprob for e in entries] == [
            None, *(logprob_of(t, i) for i, t in enumerate(request.prompt_token_ids[1:]))
        ]  # fmt: skip


def test_the_queue_limit_counts_requests() -> None:
    made, _ = made_for(0, False, max_num_queued_reqs=2, max_num_seqs=1)
    made.submit([1], SamplingParams(n=3, seed=1, max_tokens=2))
    made.submit([2], GREEDY)
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        made.submit([3], GREEDY)
    assert made.stats()["waiting"] == 4  # answers; nothing of the refused request
    run(made)
    made.submit([3], GREEDY)
    run(made)
    assert_idle(made)


def test_more_than_there_is() -> None:
    """A request that could never run is refused at once; one that can run some day waits."""
    with pytest.raises(ValueError, match=r"gives 3 cache blocks of 8 tokens, but one request .* needs 4"):
        made_for(0, False, num_gpu_blocks_override=3, max_model_len=32)
    made, _ = made_for(0, True, num_gpu_blocks_override=4, max_model_len=32)
    with pytest.raises(RequestError, match="maximum context length is 32 tokens"):
        made.submit(list(range(32)))
    whole = made.submit(list(range(31)), GREEDY)  # all there is
    behind = made.submit([1], GREEDY)
    run(made)
    assert (len(whole.token_ids), len(behind.token_ids)) == (1, 5)
    withheld = made._cache.blocks.take(3)
    assert withheld is not None
    waits = made.submit(list(range(20)), GREEDY)
    for _ in range(20):
        made.step()
    assert made.stats()["waiting"] == 1 and not waits.token_ids
    made._cache.blocks.release(withheld[0])
    run(made)
    assert waits.token_ids == answer_to(range(20), 5)


def test_no_phase_starves_the_other() -> None:
    """Prompts that keep coming never stop the answers, and answers that keep coming never stop a prompt."""
    made, _ = made_for(3, True, max_num_batched_tokens=16, max_num_seqs=4)
    long = made.submit(list(range(200)), GREEDY)
    answers = [
        made.submit([i], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)) for i in range(60)
    ]
    first_answer_by = first_prompt_by = 0
    for step in range(MOST_STEPS):
        made.step()
        if not first_answer_by and answers[0].finished:
            first_answer_by = step
        if long.finished:
            first_prompt_by = step
            break
    # the prompt came first: it takes what three answers of four tokens each leave of 16
    assert first_prompt_by <= 200 // 4 + 10
    assert first_answer_by <= first_prompt_by
    run(made)
    assert all(a.token_ids == answer_to([i], 2) for i, a in enumerate(answers))


def test_the_end_token_at_once() -> None:
    """Ahead of the first token's reading a window is dispatched already; nothing of it is heard."""
    for drafts, ahead in WAYS:
        made, _ = made_for(drafts, ahead, lambda *_: EOS)
        request = made.submit(list(range(16)), SamplingParams(temperature=0, max_tokens=9))
        run(made)
        assert (request.token_ids, request.finish_reason) == ([EOS], "stop")
        assert made.stats()["generation_tokens"] == 1
        assert_idle(made)


def test_salted_prompts_share_with_their_own_salt_alone() -> None:
    made, _ = made_for(0, False)
    prompt = list(range(20))
    hits = []
    for salt in ("", "a", "a", "b", ""):
        request = made.submit(prompt, GREEDY, cache_salt=salt)
        run(made)
        hits.append(request.cached_tokens["device"])
    assert hits == [0, 0, 16, 0, 16]


def test_every_prompt_token_is_computed_or_hit() -> None:
    """The counts add up: tokens asked = tokens run + tokens from the cache, without preemptions."""
    made, _ = made_for(3, True, max_num_batched_tokens=40)
    prompts = [list(range(n)) for n in (5, 30, 30, 31, 9)]
    for prompt in prompts:
        made.submit(prompt, GREEDY)
        run(made)
    stats = made.stats()
    asked = sum(map(len, prompts))
    assert stats["prefix_cache_queries"] == asked
    assert stats["prompt_tokens"] + stats["prefix_cache_hits"] == asked
    assert stats["prefix_cache_hits"] == 24 + 24  # nothing kept a state at 8
    assert stats["generation_tokens"] == 5 * len(prompts)


def test_aborted_answers_take_no_more_steps() -> None:
    """What an abort frees is free at once, also where the answer's last boundary was not committed yet."""
    for steps in range(1, 12):
        made, device = made_for(1, False)
        request = made.submit(list(range(7)), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        for _ in range(steps):
            made.step()
        before = device.steps
        made.abort(request)
        assert not made.has_work and device.steps == before
