"""The one thread that owns the engine, and the queue through which all others talk to it.

Callers hand in prepared requests with a listener; the listener gets every delta, called on the engine thread,
so it must only pass it on. If a step fails the engine is dead: all requests end with finish_reason "error".
"""

import contextlib
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable

from serving.engine import Engine
from serving.request import Delta, Request

logger = logging.getLogger(__name__)
Listener = Callable[[Delta], None]


class EngineDeadError(RuntimeError):
    """The engine stopped on an error and takes no more requests."""


@dataclasses.dataclass(frozen=True)
class _Submit:
    request: Request
    listener: Listener


@dataclasses.dataclass(frozen=True)
class _Abort:
    request: Request


@dataclasses.dataclass(frozen=True)
class _Stop:
    pass


class EngineThread:
    """Runs an engine until stopped. `submit` and `abort` may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self._inbox: queue.SimpleQueue[_Submit | _Abort | _Stop] = queue.SimpleQueue()
        self._listeners: dict[Request, Listener] = {}
        self._open: dict[Request, int] = {}  # answers whose last delta has not been passed on
        self._closing = threading.Lock()  # nothing enters the inbox once `_closed` is set
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step in progress; requests still open are aborted."""
        self._inbox.put(_Stop())
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    def submit(self, request: Request, listener: Listener) -> None:
        """Queues a prepared request.

        Raises EngineDeadError if the engine has stopped, QueueFullError if too many requests wait already.
        """
        with self._closing:
            if self._closed:
                raise EngineDeadError(f"the engine has stopped: {self.error or 'shut down'}")
            self.engine.check_room(self._inbox.qsize())
            self._inbox.put(_Submit(request, listener))

    def abort(self, request: Request) -> None:
        """Ends a request soon; its listener hears no more. No effect on one that has finished."""
        self._inbox.put(_Abort(request))

    def _run(self) -> None:
        try:
            while self._take_messages():
                if self.engine.has_work:
                    for delta in self.engine.step():
                        self._tell(delta)
        except BaseException as error:
            logger.exception("the engine failed")
            self.error = error
        self._end_all("abort" if self.error is None else "error")

    def _take_messages(self) -> bool:
        """Handles what is queued, waiting for a message if there is nothing else to do; False means stop."""
        wait = not self.engine.has_work
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._inbox.get(block=wait)
                wait = False
                if isinstance(message, _Stop):
                    return False
                if isinstance(message, _Submit):
                    self._listeners[message.request] = message.listener
                    self._open[message.request] = len(message.request.answers)
                    self.engine.add(message.request)
                elif message.request in self._listeners:
                    self._forget(message.request)
                    self.engine.abort(message.request)
        return True

    def _tell(self, delta: Delta) -> None:
        request = delta.answer.request
        listener = self._listeners.get(request)
        if listener is None:  # its listener failed on an earlier delta of this step
            return
        if delta.finish_reason is not None:
            self._open[request] -= 1
            if not self._open[request]:
                self._forget(request)
        try:
            listener(delta)
        except Exception:  # the reader's fault (its event loop has closed, say), never the engine's end
            logger.exception("a listener failed; its request is aborted")
            self._forget(request)
            self.engine.abort(request)

    def _forget(self, request: Request) -> None:
        self._listeners.pop(request, None)
        self._open.pop(request, None)

    def _end_all(self, reason: str) -> None:
        """Ends every open request, those still in the inbox too."""
        with self._closing:
            self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._inbox.get(block=False)
                if isinstance(message, _Submit):
                    self._listeners[message.request] = message.listener
        for request, listener in self._listeners.items():
            for answer in request.answers:
                if answer.finish_reason is None:
                    answer.processor.stop(reason)
                    with contextlib.suppress(Exception):
                        listener(Delta(answer, (), "", reason, None))
        self._listeners.clear()
