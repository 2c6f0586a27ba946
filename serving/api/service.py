"""What every endpoint needs: the engine, the names it serves and how answers are reported."""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from glm_jax.chat import ChatTemplate
from serving.api.errors import UnknownModelError, error_body
from serving.async_engine import AsyncEngine
from serving.engine_thread import EngineDeadError
from serving.request import Delta, Request


@dataclasses.dataclass(frozen=True)
class Service:
    """`names`: what clients may call the model, the first is reported; `sampling_defaults`: the
    checkpoint's."""

    engine: AsyncEngine
    names: tuple[str, ...]
    chat_template: ChatTemplate | None
    sampling_defaults: Mapping[str, float]
    prompt_tokens_details: bool = False
    started: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        """UnknownModelError unless the model is ours or not named."""
        if name is not None and name not in self.names:
            raise UnknownModelError(f"The model `{name}` does not exist: this server has {list(self.names)}")

    def usage(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Token counts so far; an end token counts as generated."""
        prompt = sum(len(request.prompt) for request in requests)
        generated = sum(len(answer.token_ids) for request in requests for answer in request.answers)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
        }
        if self.prompt_tokens_details:
            cached = sum(sum(request.cached_tokens.values()) for request in requests)
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    async def finish(self, requests: Sequence[Request]) -> None:
        """Runs requests to their ends. Raises what `AsyncEngine.running` does; cancelled, it
        aborts them."""

        async def run(request: Request) -> None:
            async with self.engine.running(request) as deltas:
                async for _ in deltas:
                    pass

        try:
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    group.create_task(run(request))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures


def frame(payload: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n"


DONE = "data: [DONE]\n\n"


async def frames_until_done(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[str, None]:
    """Chunks as events, then [DONE]; a failure of the engine becomes an error event before it."""
    try:
        async with contextlib.aclosing(chunks) as open_chunks:
            async for chunk in open_chunks:
                yield frame(chunk)
    except EngineDeadError as error:
        yield frame(error_body(str(error), "InternalServerError", 500))
    yield DONE


def says_something(delta: Delta) -> bool:
    """Whether a delta is worth a chunk: steps that only filled a held-back text are not."""
    return bool(delta.text) or delta.finish_reason is not None
