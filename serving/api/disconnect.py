"""Work that ends when the client goes away, noticed even while nothing is being sent.

Starlette's own `request.is_disconnected` sees a disconnect only when asked, and its streams only when they
send; here the ASGI `http.disconnect` message races the work.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises ClientGoneError if the client leaves first.

    The request's body must have been read: `receive` is asked for what comes after it.
    """

    async def client_leaves() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(client_leaves())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream(Response):
    """Server-sent events from a generator of complete frames; the generator is closed when the client
    leaves."""

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGoneError):
            await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            frame = await anext(events)  # a request refused here is still answered with a status
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while frame:
                await send({"type": "http.response.body", "body": frame.encode(), "more_body": True})
                frame = await anext(events, "")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
