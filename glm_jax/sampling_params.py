"""What a request may ask of the sampler, under vLLM's names."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from glm_jax.errors import RequestError

GREEDY_BELOW = 1e-5  # temperatures under this are greedy; between it and LOWEST_TEMPERATURE they are raised
LOWEST_TEMPERATURE = 0.01
MOST_CHOICES = 128
MOST_STOPS = 64
MOST_LOGPROBS = 20
MOST_BIASES = 1024
STRUCTURES = ("json", "json_object", "regex", "choice", "grammar")


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
        min_tokens: the first that many tokens cannot end the answer (at most max_tokens).
        presence_penalty, frequency_penalty: -2 to 2, subtracted from the logits of generated tokens, once
            or once for each occurrence; 0 is off.
        repetition_penalty: above 0 and at most 2, divides the logits of the prompt's and answer's tokens;
            1 is off.
        logit_bias: {token id: bias from -100 to 100} added to the logits.
        allowed_token_ids: only these can be drawn.
        logprobs: log-probabilities of the drawn token and of this many best alternatives, 0 to 20.
        prompt_logprobs: the same for every prompt token; such requests read no cached prefix.
        structured_outputs: what the answer must be, exactly one of {"json": schema}, {"json_object": True},
            {"regex": pattern}, {"choice": [texts]} or {"grammar": Lark grammar}.
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
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Mapping[str, Any] | None = None

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
        self._check_logits()
        if self.n > 1 and self.greedy:
            raise RequestError(f"n must be 1 when using greedy sampling, got {self.n}", "n")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        if not self.greedy and self.temperature < LOWEST_TEMPERATURE:
            object.__setattr__(self, "temperature", LOWEST_TEMPERATURE)

    def _check_logits(self) -> None:
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -2.0, 2.0, "between -2 and 2")
        _number("repetition_penalty", self.repetition_penalty, math.ulp(0.0), 2.0, "above 0 and at most 2")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MOST_LOGPROBS)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MOST_BIASES:
                message = f"logit_bias must map at most {MOST_BIASES} token ids to biases"
                raise RequestError(message, "logit_bias")
            try:
                biases = {int(token): value for token, value in self.logit_bias.items()}
            except ValueError as error:
                message = f"logit_bias must map token ids to biases: {error}"
                raise RequestError(message, "logit_bias") from error
            for value in biases.values():
                _number("logit_bias", value, -100.0, 100.0, "between -100 and 100")
            object.__setattr__(self, "logit_bias", biases)
        if self.structured_outputs is not None:
            given = self.structured_outputs
            if not isinstance(given, Mapping) or len(given) != 1 or not set(given) <= set(STRUCTURES):
                raise RequestError(
                    f"structured_outputs must have exactly one of {STRUCTURES}, got {given!r}",
                    "structured_outputs",
                )
        if self.allowed_token_ids is not None:
            allowed = tuple(self.allowed_token_ids)
            if not allowed:
                raise RequestError("allowed_token_ids must not be empty", "allowed_token_ids")
            for token in allowed:
                _integer("allowed_token_ids", token, 0)
            object.__setattr__(self, "allowed_token_ids", allowed)

    @property
    def allowed_ids(self) -> tuple[int, ...]:
        return tuple(self.allowed_token_ids or ())

    @property
    def biased_ids(self) -> tuple[int, ...]:
        return tuple(self.logit_bias or ())

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(self.stop_token_ids or ())
