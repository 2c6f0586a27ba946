"""A request and its answers, as callers see them and as the scheduler tracks them."""

import dataclasses
import enum

import numpy as np

from glm_jax.sampling_params import SamplingParams
from serving.output import AnswerProcessor


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False)
class Request:
    """What `Engine.submit` returns; it fills up while the engine steps.

    `token_ids`, `text`, `finish_reason` and `stop_reason` are those of the first answer, `answers` holds all
    n.
    finish_reason: None while running, then "stop", "length", "abort" or "error".
    """

    prompt: np.ndarray  # [prompt tokens] int32
    sampling: SamplingParams
    seed: int  # uint32
    limit: int  # positions at or past it are never run: an answer's last token is drawn, not run
    answers: tuple["Answer", ...] = ()
    cached_tokens: dict[str, int] = dataclasses.field(
        default_factory=lambda: {"device": 0, "host": 0, "disk": 0}
    )

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
    def finish_reason(self) -> str | None:
        return self.answers[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.answers[0].processor.stop_reason

    @property
    def finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers)


@dataclasses.dataclass(eq=False)
class Answer:
    """One of the n answers to a request: the unit that is scheduled.

    Owned by the thread that steps the engine once it is submitted.
    """

    request: Request
    index: int  # which of the request's answers
    processor: AnswerProcessor
    status: Status = Status.WAITING
    slot: int = -1  # row of the scheduler's tables while running

    @property
    def token_ids(self) -> list[int]:
        return self.processor.token_ids

    @property
    def text(self) -> str:
        return self.processor.text

    @property
    def finish_reason(self) -> str | None:
        return self.processor.finish_reason


@dataclasses.dataclass(frozen=True)
class Delta:
    """What one step added to one answer. `finish_reason` is set on its last delta."""

    answer: Answer
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
