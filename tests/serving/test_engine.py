"""The engine over a fake device: answers equal their definition whatever else runs, and nothing leaks."""

from collections.abc import Sequence
from typing import Any

import pytest

from glm_jax.errors import RequestError
from glm_jax.sampling_params import SamplingParams
from serving.engine import Engine
from serving.engine_config import EngineConfig
from tests.serving.fake_device import FakeDevice, NextToken, answer_to, hashed_token
from tests.serving.tiny_text import EOS, TOKENIZER, weightless_model

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def engine(next_token: NextToken = hashed_token, drafts: int = 0, **limits: Any) -> tuple[Engine, FakeDevice]:
    """An engine that reads every step's output at once, unless told otherwise."""
    config = EngineConfig(
        **{
            "block_size": 8,
            "snapshot_spacing": 64,
            "max_num_seqs": 4,
            "async_scheduling": False,
            "speculative_config": {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None,
            **limits,
        }
    )
    device = FakeDevice(config.block_size, next_token, drafts=drafts)
    return Engine(weightless_model(num_mtp_layers=1), config, runner=device), device


def assert_idle(made: Engine) -> None:
    while made.has_work:  # outputs of steps that were ahead, boundaries still to commit
        made.step()
    made._cache.blocks.check()
    made._cache.states.check()
    stats = made.stats()
    assert stats["running"] == stats["waiting"] == 0
    assert stats["free_blocks"] == stats["total_blocks"]
    assert stats["free_state_slots"] == stats["total_state_slots"]


def says(text: str) -> NextToken:
    """A device whose every answer is this text, then end-of-text for ever."""
    ids = TOKENIZER.encode(text)

    def next_token(tokens: Sequence[int], _: int) -> int:
        start = len(TOKENIZER.encode("prompt"))
        done = len(tokens) - start
        return ids[done] if done < len(ids) else EOS

    return next_token


def test_a_request_from_start_to_end() -> None:
    made, _ = engine()
    request = made.submit([1, 2, 3], GREEDY)
    assert request.finish_reason is None and made.stats()["waiting"] == 1
    made.run_until_idle()
    assert request.token_ids == answer_to([1, 2, 3], 5)
    assert request.finish_reason == "length" and request.finished
    assert request.text == TOKENIZER.decode(request.token_ids)
    assert request.cached_tokens == {"device": 0, "host": 0, "disk": 0}
    assert_idle(made)


def test_a_step_keeps_to_its_budget_and_starves_nobody() -> None:
    made, runner = engine(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=200)
    short = [
        made.submit([i], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)) for i in range(3)
    ]
    made.step()
    long = made.submit(list(range(60)), GREEDY)
    for step in range(12):
        made.step()
        assert all(len(request.token_ids) == step + 2 for request in short)
    # Three answers take three tokens of each step, five are left for the prompt: 12 steps for 60 tokens.
    assert len(long.token_ids) == 1
    assert set(runner.prefills[3:]) == {5}
    made.run_until_idle()
    assert long.token_ids == answer_to(range(60), 5)


def test_requests_wait_for_blocks_in_order() -> None:
    made, _ = engine(num_gpu_blocks_override=4, max_model_len=32)
    first = made.submit(list(range(20)), GREEDY)  # 3 blocks
    second = made.submit(list(range(10)), GREEDY)  # 2 blocks, one is free
    third = made.submit([1], SamplingParams(temperature=0, max_tokens=1))  # would fit, but comes later
    made.step()
    assert (made.stats()["running"], made.stats()["waiting"]) == (1, 2)
    made.run_until_idle()
    assert [len(r.token_ids) for r in (first, second, third)] == [5, 5, 1]
    assert_idle(made)


def test_no_shape_but_the_warmed_up_ones() -> None:
    made, runner = engine(max_num_batched_tokens=300, max_num_seqs=3)
    # prefills, their prompt log-probabilities; decodes, their log-probabilities; prefills'; tables
    assert made.warm_up() == 3 + 3 + 3 + 3 + 1 + 1
    warmed = set(runner.shapes)
    assert runner.compiled == warmed
    assert warmed == {
        ("prefill", 64),
        ("prefill", 256),
        ("prefill", 300),
        ("decode", 1),
        ("decode", 2),
        ("decode", 3),
    }
    for length in (1, 63, 64, 65, 250, 290):
        made.submit(list(range(length)), GREEDY)
    made.run_until_idle()
    assert runner.shapes == warmed


def test_seeds_and_choices() -> None:
    made, _ = engine()
    sampling = SamplingParams(n=3, seed=7, max_tokens=6, ignore_eos=True)
    first, second = made.submit([5], sampling), made.submit([5], sampling)
    other = made.submit([5], SamplingParams(n=3, max_tokens=6, ignore_eos=True))
    made.run_until_idle()
    texts = [answer.token_ids for answer in first.answers]
    assert texts == [answer.token_ids for answer in second.answers]
    assert texts == [answer_to([5], 6, seed=8 + index) for index in range(3)]
    assert texts[0] != other.answers[0].token_ids
    assert [answer.index for answer in first.answers] == [0, 1, 2]


def test_deltas_add_up() -> None:
    made, _ = engine()
    request = made.submit("prompt", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    tokens, text, reasons = [], "", []
    while made.has_work:
        for delta in made.step():
            tokens += delta.token_ids
            text += delta.text
            reasons.append(delta.finish_reason)
    assert (tokens, text) == (request.token_ids, request.text)
    assert reasons == [None] * 39 + ["length"]


@pytest.mark.parametrize(
    ("said", "sampling", "text", "reason", "stop_reason", "count"),
    [
        ("hello", {}, "hello", "stop", None, 6),
        ("hello", {"ignore_eos": True, "max_tokens": 9}, "hello", "length", None, 9),
        ("hello", {"max_tokens": 3}, "hel", "length", None, 3),
        ("one Question: two", {"stop": ["Question:", "</s>"]}, "one ", "stop", "Question:", 13),
        ("one Quest", {"stop": ["Question:"]}, "one Quest", "stop", None, 10),
        ("one Quest", {"stop": ["Question:"], "max_tokens": 8}, "one Ques", "length", None, 8),
        ("a. b", {"stop": ".", "include_stop_str_in_output": True}, "a.", "stop", ".", 2),
        ("a. b", {"stop": ".", "max_tokens": 2}, "a", "stop", ".", 2),
        ("xyz", {"stop_token_ids": TOKENIZER.encode("y")}, "x", "stop", TOKENIZER.encode("y")[0], 2),
        (
            "xyz",
            {"stop_token_ids": TOKENIZER.encode("y"), "include_stop_str_in_output": True},
            "xy",
            "stop",
            TOKENIZER.encode("y")[0],
            2,
        ),
        ("x", {"ignore_eos": True, "stop_token_ids": [EOS]}, "x", "stop", EOS, 2),
        ("\U0001f600", {"max_tokens": 2}, "�", "length", None, 2),
        (
            "x",
            {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 2},
            "x<|endoftext|>",
            "length",
            None,
            2,
        ),
    ],
)
def test_ends(said: str, sampling: dict, text: str, reason: str, stop_reason: object, count: int) -> None:
    made, _ = engine(says(said))
    request = made.submit("prompt", SamplingParams(temperature=0, **{"max_tokens": 50, **sampling}))
    shown = ""
    while made.has_work:
        shown += "".join(delta.text for delta in made.step())
    assert (request.text, request.finish_reason, request.stop_reason) == (text, reason, stop_reason)
    assert len(request.token_ids) == count
    assert shown == request.text
    assert_idle(made)


def test_every_end_token_counts() -> None:
    device = FakeDevice(8, lambda tokens, _: 7 if len(tokens) == 4 else 50)
    made = Engine(weightless_model(eos_token_ids=(3, 7)), EngineConfig(block_size=8), runner=device)
    request = made.submit([1, 2], SamplingParams(temperature=0, max_tokens=9))
    made.run_until_idle()
    assert (len(request.token_ids), request.finish_reason) == (3, "stop")


def test_the_answer_fills_the_context_at_most() -> None:
    made, _ = engine(max_model_len=32)
    for asked in (None, 100, 22):
        request = made.submit(
            list(range(10)), SamplingParams(temperature=0, max_tokens=asked, ignore_eos=True)
        )
        made.run_until_idle()
        assert (len(request.token_ids), request.finish_reason) == (22, "length")
    last = made.submit(list(range(31)), SamplingParams(temperature=0, ignore_eos=True))
    made.run_until_idle()
    assert last.token_ids == answer_to(range(31), 1)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "The decoder prompt cannot be empty"),
        ("", "The decoder prompt cannot be empty"),
        ([0, 300], r"token id 300 is outside the vocabulary \[0, 300\)"),
        ([-1], r"token id -1 is outside the vocabulary"),
        (list(range(32)), "maximum context length is 32 tokens. However, your prompt contains 32 tokens"),
        ("x" * 50, "your prompt contains 50 tokens"),
        ([1.5], "list of integer token ids"),
        ([True], "list of integer token ids"),
        ([[1], [2]], "list of integer token ids"),
    ],
)
def test_bad_prompts_change_nothing(prompt: object, message: str) -> None:
    made, _ = engine(max_model_len=32)
    with pytest.raises(RequestError, match=message):
        made.submit(prompt)
    assert_idle(made)


def test_a_model_without_a_tokenizer_takes_ids_only() -> None:
    model = weightless_model()
    model.tokenizer = None
    made = Engine(model, EngineConfig(block_size=8), runner=FakeDevice(8))
    request = made.submit([1], GREEDY)
    made.run_until_idle()
    assert request.token_ids == answer_to([1], 5) and request.text == ""
    with pytest.raises(RequestError, match="needs a tokenizer"):
        made.submit("text")
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        made.submit([1], SamplingParams(stop="x"))


def test_abort_at_any_moment() -> None:
    made, _ = engine(max_num_seqs=1)
    running, waiting = made.submit([1], GREEDY), made.submit([2], GREEDY)
    made.step()
    made.abort(waiting)
    assert waiting.finish_reason == "abort" and not waiting.token_ids
    made.abort(running)
    assert running.finish_reason == "abort" and len(running.token_ids) == 1
    assert_idle(made)
    made.abort(running)
    assert_idle(made)
