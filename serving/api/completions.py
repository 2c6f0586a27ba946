"""POST /v1/completions: plain text or token ids in, text out; several prompts make one answer list."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from glm_jax.errors import RequestError
from serving.api.protocol import CompletionBody
from serving.api.sampling import refuse_unsupported, sampling_params
from serving.api.service import Service, says_something
from serving.request import Answer, Delta, Request

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint


async def prepare(service: Service, body: CompletionBody) -> list[Request]:
    """Checks a body and tokenizes its prompts. Raises RequestError, UnknownModelError."""
    service.check_model(body.model)
    refuse_unsupported(body)
    prompts = _prompts(body.prompt)
    sampling = sampling_params(
        body, service.sampling_defaults, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    )

    def build() -> list[Request]:
        prepare_one = service.engine.prepare
        return [
            prepare_one(prompt, sampling, priority=body.priority, cache_salt=body.cache_salt)
            for prompt in prompts
        ]

    return await asyncio.to_thread(build)


def _prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> Sequence[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt must hold at least one prompt, got an empty list", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt


def _echo(service: Service, request: Request, body: CompletionBody) -> str:
    tokenizer = service.engine.tokenizer
    return tokenizer.decode(request.prompt) if body.echo and tokenizer is not None else ""


def _index(requests: Sequence[Request], answer: Answer) -> int:
    """Choices are numbered through all prompts."""
    return requests.index(answer.request) * answer.request.sampling.n + answer.index


def full_response(
    service: Service, requests: Sequence[Request], body: CompletionBody, head: dict[str, Any]
) -> dict[str, Any]:
    choices = [
        {
            "index": _index(requests, answer),
            "text": _echo(service, request, body) + answer.text,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.processor.stop_reason,
        }
        for request in requests
        for answer in request.answers
    ]
    return {**head, "choices": choices, "usage": service.usage(requests)}


async def chunks(
    service: Service, requests: Sequence[Request], body: CompletionBody, head: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """Chunks of all prompts as they come; the usage last, if asked for."""
    options = body.stream_options

    def chunk(index: int, text: str, finish: str | None, stop: str | int | None) -> dict[str, Any]:
        choice = {
            "index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": stop,
        }  # fmt: skip
        usage = {"usage": service.usage(requests)} if options and options.continuous_usage_stats else {}
        return {**head, "choices": [choice], **usage}

    if body.echo:
        for request in requests:
            for answer in request.answers:
                yield chunk(_index(requests, answer), _echo(service, request, body), None, None)
    async with contextlib.aclosing(_merged(service, requests)) as deltas:
        async for delta in deltas:
            if says_something(delta):
                yield chunk(
                    _index(requests, delta.answer), delta.text, delta.finish_reason, delta.stop_reason
                )
    if options and options.include_usage:
        yield {**head, "choices": [], "usage": service.usage(requests)}


async def _merged(service: Service, requests: Sequence[Request]) -> AsyncGenerator[Delta, None]:
    """Deltas of several requests in the order they come."""
    merged: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()

    async def forward(request: Request) -> None:
        try:
            async with service.engine.running(request) as deltas:
                async for delta in deltas:
                    merged.put_nowait(delta)
            merged.put_nowait(None)
        except Exception as error:
            merged.put_nowait(error)

    tasks = [asyncio.create_task(forward(request)) for request in requests]
    try:
        running = len(tasks)
        while running:
            item = await merged.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def head(service: Service, request_id: str) -> dict[str, Any]:
    """What every chunk of one answer repeats."""
    return {
        "id": f"cmpl-{request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.names[0],
    }
