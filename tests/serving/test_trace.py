"""A traced request tells its life in order; without tracing nothing is kept."""

from itertools import pairwise

from glm_jax.sampling_params import SamplingParams
from tests.serving.test_engine import GREEDY, engine


def test_a_life_with_a_hit_a_preemption_and_an_end() -> None:
    made, device = engine(drafts=1, trace_requests=True, max_num_batched_tokens=16)
    device.right = 1.0
    prompt = list(range(30))
    made.submit(prompt, GREEDY)
    made.run_until_idle()
    request = made.submit(prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), priority=2)
    for _ in range(2):
        made.step()
    made._scheduler.preempt(request.answers[0])
    made.run_until_idle()
    assert request.trace is not None
    # One step runs the 6 tokens that are not cached, the next one a window of 2. Preempted with 33 tokens
    # known it finds the state that the first request left at 32, its answer's last boundary.
    assert [(event.what, event.details) for event in request.trace.events] == [
        ("submitted", {"prompt": 30, "priority": 2}),
        ("admitted", {"row": 0, "hit": 24, "target": 30}),
        ("chunk", {"start": 24, "length": 6}),
        ("first token", {"accepted": 0, "kept": 1}),
        ("window", {"accepted": 1, "kept": 2}),
        ("preempted", {"known": 33}),
        ("resumed", {"row": 0, "hit": 32, "target": 33}),
        ("chunk", {"start": 32, "length": 1}),
        ("first token", {"accepted": 0, "kept": 1}),
        ("window", {"accepted": 1, "kept": 2}),
        ("finished", {"reason": "length", "generated": 6}),
    ]
    assert all(a.seconds <= b.seconds for a, b in pairwise(request.trace.events))
    lines = str(request.trace).splitlines()
    assert len(lines) == 11
    assert lines[0] == "  0.000000 s  answer 0 submitted prompt=30 priority=2"
    assert lines[-1].endswith("answer 0 finished reason=length generated=6")


def test_answers_are_told_apart_and_aborts_are_seen() -> None:
    made, _ = engine(trace_requests=True)
    request = made.submit([1, 2], SamplingParams(n=2, seed=1, max_tokens=9, ignore_eos=True))
    made.step()
    made.abort(request)
    assert request.trace is not None
    events = [(e.answer, e.what, e.details.get("reason")) for e in request.trace.events]
    assert events[:2] == [(0, "submitted", None), (1, "submitted", None)]
    assert events[-2:] == [(0, "finished", "abort"), (1, "finished", "abort")]


def test_off_by_default() -> None:
    made, _ = engine()
    request = made.submit([1], GREEDY)
    made.run_until_idle()
    assert request.trace is None
