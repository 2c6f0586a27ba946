"""The engine as asyncio sees it: requests in, deltas out, and a request whose reader goes away is aborted."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from glm_jax.sampling_params import SamplingParams
from serving.engine_thread import EngineDeadError, EngineThread
from serving.request import Delta, Request


class AsyncEngine:
    """Passes requests of an event loop to the engine thread."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self.max_model_len = thread.engine.plan.max_model_len
        self.tokenizer = thread.engine.tokenizer

    @property
    def alive(self) -> bool:
        return self._thread.alive

    def prepare(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """Checks and builds a request. Raises RequestError. Tokenizing takes time: not for the event loop."""
        return self._thread.engine.prepare(prompt, sampling, priority=priority, cache_salt=cache_salt)

    @contextlib.asynccontextmanager
    async def running(self, request: Request) -> AsyncIterator[AsyncIterator[Delta]]:
        """Submits a prepared request; yields its deltas, which end after the last one of its last answer.

        Leaving before that aborts the request. Raises QueueFullError or EngineDeadError if it is not taken;
        the deltas raise EngineDeadError if the engine fails.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Delta] = asyncio.Queue()
        left = len(request.answers)

        def pass_on(delta: Delta) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, delta)

        async def deltas() -> AsyncIterator[Delta]:
            nonlocal left
            while left:
                delta = await queue.get()
                left -= delta.finish_reason is not None
                if delta.finish_reason == "error":
                    raise EngineDeadError("the engine failed while it ran this request")
                yield delta

        self._thread.submit(request, pass_on)
        try:
            yield deltas()
        finally:
            if left:
                self._thread.abort(request)
