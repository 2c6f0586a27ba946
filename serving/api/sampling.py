"""A request body's sampling fields as SamplingParams: the request's word, else the checkpoint's, else
OpenAI's."""

from collections.abc import Mapping
from typing import Any

from glm_jax.errors import RequestError
from glm_jax.sampling_params import SamplingParams
from serving.api.protocol import SamplingBody

FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
# Fields that would change the answer and are not computed, each with the values that ask for nothing.
# Refused, since ignoring them would return something else than what was asked for.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "min_tokens": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
    "best_of": (1,),
    "suffix": ("",),
}


def refuse_unsupported(body: SamplingBody) -> None:
    """RequestError for a field that this server knows but cannot honour."""
    for name, neutral in NEUTRAL.items():
        value = (body.model_extra or {}).get(name)
        if value is not None and value not in neutral:
            raise RequestError(f"{name} is not supported by this server, got {value!r}", name)
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", "stream_options")


def sampling_params(
    body: SamplingBody, defaults: Mapping[str, float], max_tokens: int | None
) -> SamplingParams:
    """Raises RequestError for bad values; `max_tokens` None: as many as there is room for."""
    given = {name: value for name in FIELDS if (value := getattr(body, name)) is not None}
    return SamplingParams(**{**defaults, **given, "max_tokens": max_tokens})
