"""The engine as asyncio sees it: requests in, deltas out, and a request whose reader goes away is aborted."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

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

    def prepare(self, prompt: str | Sequence[int], sampling: SamplingParams) -> Request:
        """Checks and builds a request. Raises RequestError. Tokenizing takes time: not for the event loop."""
        return self._thread.engine.prepare(prompt, sampling)

    async def stream(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Runs a prepared request; ends after the last delta of its last answer.

        Closing the generator before that aborts the request. Raises EngineDeadError if the engine fails.
        """
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[Delta] = asyncio.Queue()

        def pass_on(delta: Delta) -> None:
            loop.call_soon_threadsafe(deltas.put_nowait, delta)

        self._thread.submit(request, pass_on)
        running = len(request.answers)
        try:
            while running:
                delta = await deltas.get()
                if delta.finish_reason == "error":
                    raise EngineDeadError("the engine failed while it ran this request")
                running -= delta.finish_reason is not None
                yield delta
        finally:
            if running:
                self._thread.abort(request)
