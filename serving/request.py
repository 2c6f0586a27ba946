"""A request and its answers, as callers see them and as the scheduler tracks them."""

import dataclasses
import enum

import numpy as np

from glm_jax.sampling_params import SamplingParams
from serving.block_hash import BlockHash
from serving.grammar import GrammarState
from serving.output import AnswerProcessor
from serving.token_logprobs import TokenLogprobs
from serving.trace import Trace


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False)
class Request:
    """What `Engine.submit` returns; it fills up while the engine steps.

    `token_ids`, `text`, `logprobs`, `finish_reason` and `stop_reason` are those of the first answer,
    `answers` holds all n. finish_reason: None while running, then "stop", "length", "abort" or "error".
    """

    prompt: np.ndarray  # [prompt tokens] int32
    sampling: SamplingParams
    seed: int  # uint32
    limit: int  # positions at or past it are never run: an answer's last token is drawn, not run
    root: BlockHash  # start of the block hash chain
    priority: int = 0  # lower runs first
    answers: tuple["Answer", ...] = ()
    prompt_logprobs: list[TokenLogprobs | None] = dataclasses.field(default_factory=lambda: [None])
    cached_tokens: dict[str, int] = dataclasses.field(
        default_factory=lambda: {"device": 0, "host": 0, "disk": 0}
    )
    trace: Trace | None = None  # with EngineConfig(trace_requests=True)

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.prompt.tolist()

    @property
    def token_ids(self) -> list[int]:
        return self.answers[0].token_ids

    @property
    def text(self) -> str:
        return self.answers[0].text

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return self.answers[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        return self.answers[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.answers[0].processor.stop_reason

    @property
    def finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers)


@dataclasses.dataclass(eq=False)
class Placement:
    """What a running answer holds and how far it has got. Gone when it finishes or is preempted."""

    row: int  # row of the scheduler's tables, also its request slot on the device
    blocks: list[int]
    state_slot: int
    initial_slot: int  # state slot the first chunk continues from, -1 for empty state
    resumed_at: int  # tokens that were cached
    target: int  # tokens known at admission: what prefill covers
    caching: bool  # whether its blocks and states are published
    snapshot_at: tuple[tuple[int, bool], ...]  # boundaries to keep in prefill, ascending; True: regular
    scheduled: int  # tokens of [0, target) that dispatched chunks cover
    published: int = 0  # leading blocks published, or shared when it was admitted
    position: int = 0  # first position of the next window, as far as outputs were read
    drafts: tuple[int, ...] = ()  # proposed for the next window; read only where a grammar needs them
    unread: int = 0  # dispatched windows whose outputs were not read yet
    rolling: list[int] = dataclasses.field(default_factory=list)  # two state slots, written in turn
    rolling_at: list[int] = dataclasses.field(default_factory=lambda: [-1, -1])  # boundary each holds
    boundary: int = -1  # next block boundary whose state is kept, -1: none are

    @property
    def decoding(self) -> bool:
        return self.scheduled == self.target


@dataclasses.dataclass(eq=False)
class Answer:
    """One of the n answers to a request: the unit that is scheduled.

    Owned by the thread that steps the engine once it is submitted.
    """

    request: Request
    index: int  # which of the request's answers
    processor: AnswerProcessor
    grammar: GrammarState | None = None  # what a guided answer may say next
    status: Status = Status.WAITING
    arrival: int = 0  # order of submission
    placement: Placement | None = None
    hashes: list[BlockHash] = dataclasses.field(default_factory=list)  # chain of its full blocks so far
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    preemptions: int = 0
    admitted: bool = False  # ever: hits are counted at first admission

    @property
    def token_ids(self) -> list[int]:
        return self.processor.token_ids

    @property
    def text(self) -> str:
        return self.processor.text

    @property
    def finish_reason(self) -> str | None:
        return self.processor.finish_reason

    @property
    def known_tokens(self) -> int:
        return len(self.request.prompt) + len(self.processor.token_ids)

    def note(self, what: str, **details: int | str) -> None:
        """Adds an event to the request's trace, if it has one."""
        if self.request.trace is not None:
            self.request.trace.note(self.index, what, **details)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Known tokens [start, stop), prompt and answer as one sequence; int32, shorter past the last one."""
        prompt = self.request.prompt
        if stop <= len(prompt):
            return prompt[start:stop]
        answered = self.processor.token_ids[max(start - len(prompt), 0) : max(stop - len(prompt), 0)]
        return np.concatenate([prompt[start:stop], np.array(answered, np.int32)])


@dataclasses.dataclass(frozen=True)
class Delta:
    """What one step added to one answer. `finish_reason` is set on its last delta."""

    answer: Answer
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
