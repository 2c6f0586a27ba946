"""A request body's sampling fields as SamplingParams: the request's word, else the checkpoint's, else
OpenAI's."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from glm_jax.errors import RequestError
from glm_jax.sampling_params import SamplingParams
from serving.api.protocol import SamplingBody

# Computed by name alone: a field of the body is a field of SamplingParams. Logprobs need a form of their own.
FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams)) - {
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
}
# Other fields that would change the answer, each with the values that ask for nothing. Anything else is
# refused, since ignoring it would return something else than what was asked for.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "min_tokens": (0,),
    "bad_words": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
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
        if value is not None and name not in FIELDS and value not in neutral:
            raise RequestError(f"{name} is not supported by this server, got {value!r}", name)
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", "stream_options")


def sampling_params(
    body: SamplingBody, defaults: Mapping[str, float], max_tokens: int | None
) -> SamplingParams:
    """Raises RequestError for bad values; `max_tokens` None: as many as there is room for."""
    values = {**body.model_dump(), **(body.model_extra or {})}
    given = {name: values[name] for name in FIELDS if values.get(name) is not None}
    if (structure := _structure(values.get("response_format"))) is not None:
        given["structured_outputs"] = structure
    return SamplingParams(**{**defaults, **given, "max_tokens": max_tokens})


def _structure(response_format: Any) -> dict[str, Any] | None:
    """OpenAI's response_format as `structured_outputs`; None asks for plain text."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"json": schema}
    raise RequestError(
        "response_format must be of type text, json_object or json_schema (with a schema), "
        f"got {response_format!r}",
        "response_format",
    )
