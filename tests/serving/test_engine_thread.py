"""The engine thread: every open request hears its end, whatever happens to the engine or to a listener."""

import queue
import threading

import pytest

from glm_jax.sampling_params import SamplingParams
from serving.engine_thread import EngineDeadError, EngineThread
from serving.request import Delta, Request
from tests.serving.fake_device import FakeDevice, answer_to
from tests.serving.http_server import engine_thread, idle

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def slow_device() -> FakeDevice:
    """So slow that 200 tokens cannot be over before a test has said its next word."""
    device = FakeDevice(8)
    device.pause_s = 0.005
    return device


def submit(
    thread: EngineThread, prompt: list[int], sampling: SamplingParams = LONG
) -> tuple[Request, queue.Queue]:
    deltas: queue.Queue[Delta] = queue.Queue()
    request = thread.engine.prepare(prompt, sampling)
    thread.submit(request, deltas.put)
    return request, deltas


def last(deltas: queue.Queue) -> Delta:
    while True:
        delta = deltas.get(timeout=10)
        if delta.finish_reason is not None:
            return delta


def test_all_answers_of_a_request_are_heard_to_their_ends() -> None:
    thread = engine_thread(slow_device())
    sampling = SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True)
    _, deltas = submit(thread, [1, 2], sampling)
    heard: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for _ in range(3 * 4):
        delta = deltas.get(timeout=10)
        heard[delta.answer.index] += delta.token_ids
    assert heard == {index: answer_to([1, 2], 4, seed=2 + index) for index in range(3)}
    assert idle(thread)
    thread.stop()


def test_aborted_requests_say_no_more() -> None:
    thread = engine_thread(slow_device())
    request, deltas = submit(thread, [1])
    deltas.get(timeout=10)
    thread.abort(request)
    assert idle(thread)
    assert request.finish_reason == "abort" and len(request.token_ids) < 200
    thread.stop()


def test_stopping_ends_what_is_open() -> None:
    thread = engine_thread(slow_device(), max_num_seqs=1)
    open_requests = [submit(thread, [i]) for i in range(3)]
    open_requests[0][1].get(timeout=10)
    thread.stop()
    assert [last(deltas).finish_reason for _, deltas in open_requests] == ["abort"] * 3
    assert not thread.alive
    with pytest.raises(EngineDeadError, match="shut down"):
        submit(thread, [1])


def test_a_failing_step_ends_what_is_open() -> None:
    device = slow_device()
    device.fail_at = 5
    thread = engine_thread(device, max_num_seqs=1)
    open_requests = [submit(thread, [i]) for i in range(2)]
    assert [last(deltas).finish_reason for _, deltas in open_requests] == ["error"] * 2
    assert not thread.alive
    with pytest.raises(EngineDeadError, match="the device is gone"):
        submit(thread, [1])


def test_a_failing_listener_costs_its_own_request_alone() -> None:
    thread = engine_thread(slow_device())
    called = threading.Event()

    def fail(_: Delta) -> None:
        called.set()
        raise RuntimeError("event loop is closed")

    request = thread.engine.prepare([1], LONG)
    thread.submit(request, fail)
    assert called.wait(10)
    other, deltas = submit(thread, [2], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert last(deltas).finish_reason == "length" and other.token_ids == answer_to([2], 3)
    assert idle(thread) and request.finish_reason == "abort"
    thread.stop()
