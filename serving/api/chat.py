"""POST /v1/chat/completions."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from glm_jax.errors import RequestError
from glm_jax.sampling_params import SamplingParams
from serving.api.protocol import ChatCompletionBody, Message
from serving.api.sampling import refuse_unsupported, sampling_params
from serving.api.service import Service, says_something
from serving.request import Request

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


async def prepare(service: Service, body: ChatCompletionBody) -> Request:
    """Checks a body, renders and tokenizes its conversation. Raises RequestError, UnknownModelError."""
    service.check_model(body.model)
    refuse_unsupported(body)
    if body.tools and body.tool_choice != "none":
        raise RequestError(
            "tool calls are not parsed by this server: with tools, tool_choice must be 'none', "
            f"got {body.tool_choice or 'auto'!r}",
            "tool_choice",
        )
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    sampling = sampling_params(body, service.sampling_defaults, limit)
    return await asyncio.to_thread(_build, service, body, sampling)


def _build(service: Service, body: ChatCompletionBody, sampling: SamplingParams) -> Request:
    template, tokenizer = service.chat_template, service.engine.tokenizer
    if template is None or tokenizer is None:
        raise RequestError("this checkpoint has no chat template: use /v1/completions", "messages")
    text = template.render(
        [_message(message) for message in body.messages],
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        **{"reasoning_effort": body.reasoning_effort, **(body.chat_template_kwargs or {})},
    )
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return service.engine.prepare(tokens, sampling, priority=body.priority, cache_salt=body.cache_salt)


def _message(message: Message) -> dict[str, Any]:
    if isinstance(message.content, list):
        for part in message.content:
            if part.get("type") not in TEXT_PARTS:
                raise RequestError(
                    f"content parts of type {part.get('type')!r} are not supported: this server reads text",
                    "messages",
                )
    return message.model_dump(exclude_unset=True)


def full_response(service: Service, request: Request, head: dict[str, Any]) -> dict[str, Any]:
    """The body of a finished request."""
    choices = [
        {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.processor.stop_reason,
        }
        for answer in request.answers
    ]
    return {**head, "object": "chat.completion", "choices": choices, "usage": service.usage([request])}


async def chunks(
    service: Service, request: Request, body: ChatCompletionBody, head: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """Chunks in the order clients rely on: the roles, the texts, each choice's end, the usage."""
    head = {**head, "object": "chat.completion.chunk"}
    options = body.stream_options

    def chunk(index: int, delta: dict[str, Any], **end: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **end}
        usage = {"usage": service.usage([request])} if options and options.continuous_usage_stats else {}
        return {**head, "choices": [choice], **usage}

    async with service.engine.running(request) as deltas:
        for answer in request.answers:
            yield chunk(answer.index, {"role": "assistant", "content": ""})
        async for delta in deltas:
            if says_something(delta):
                end = (
                    {}
                    if delta.finish_reason is None
                    else {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
                )
                yield chunk(delta.answer.index, {"content": delta.text} if delta.text else {}, **end)
    if options and options.include_usage:
        yield {**head, "choices": [], "usage": service.usage([request])}


def head(service: Service, request_id: str) -> dict[str, Any]:
    """What every chunk of one answer repeats."""
    return {"id": f"chatcmpl-{request_id}", "created": int(time.time()), "model": service.names[0]}
