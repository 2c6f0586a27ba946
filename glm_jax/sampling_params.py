"""What a request may ask of the sampler, under vLLM's names."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from glm_jax.errors import RequestError

GREEDY_BELOW = 1e-5  # temperatures under this are greedy; between it and LOWEST_TEMPERATURE they are raised
LOWEST_TEMPERATURE = 0.01
MOST_CHOICES = 128
MOST_STOPS = 64


def _number(name: str, value: Any, low: float, high: float, bounds: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, got {value!r}", name)
    if not low <= value <= high or math.isnan(value):
        raise RequestError(f"{name} must be {bounds}, got {value!r}", name)


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", name)
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} must be {bounds}, got {value}", name)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Checked when made: every bad value raises a `RequestError` naming the field, its value and the bound.

    Attributes:
        n: choices drawn for the prompt; more than 1 needs a temperature.
        temperature: 0 to 2; below 1e-5 greedy (then top_p, top_k and min_p have no effect), else at least
            0.01.
        top_p: in (0, 1], applied last, over what the other limits left.
        top_k: 0 and -1 mean off.
        min_p: 0 to 1, relative to the most likely token.
        seed: makes the sampled tokens repeatable; without one the engine draws one.
        max_tokens: most tokens to generate, None: as many as the model's context has room for.
        stop: strings that end the answer; the text is cut before them (after them with
            `include_stop_str_in_output`).
        stop_token_ids: token ids that end the answer, beside the model's end-of-sequence tokens.
        ignore_eos: go on past the model's end-of-sequence tokens; `stop` and `stop_token_ids` still act.
        skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MOST_CHOICES)
        _number("temperature", self.temperature, 0.0, 2.0, "between 0 and 2")
        _number("top_p", self.top_p, math.ulp(0.0), 1.0, "above 0 and at most 1")
        _integer("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0.0, 1.0, "between 0 and 1")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}", name)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stop) > MOST_STOPS:
            raise RequestError(f"stop must hold at most {MOST_STOPS} strings, got {len(stop)}", "stop")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop must hold strings that are not empty, got {text!r}", "stop")
        stop_token_ids = tuple(self.stop_token_ids or ())
        for token in stop_token_ids:
            _integer("stop_token_ids", token, 0)
        if self.n > 1 and self.greedy:
            raise RequestError(f"n must be 1 when using greedy sampling, got {self.n}", "n")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        if not self.greedy and self.temperature < LOWEST_TEMPERATURE:
            object.__setattr__(self, "temperature", LOWEST_TEMPERATURE)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(self.stop_token_ids or ())
