"""One request's life, event by event, for debugging: what happened to it, when, and why it took that long.

Kept only with EngineConfig(trace_requests=True); it then grows with every chunk and window of the request.
"""

import dataclasses
import time


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened to one answer.

    what: "submitted", "admitted", "chunk", "first token", "window", "preempted", "resumed" or "finished".
    """

    seconds: float  # of the monotonic clock
    answer: int  # which of the request's answers
    what: str
    details: dict[str, int | str]

    def __str__(self) -> str:
        details = " ".join(f"{name}={value}" for name, value in self.details.items())
        return f"answer {self.answer} {self.what} {details}".rstrip()


class Trace:
    """The events of a request in order. `str(trace)` is one line each, in seconds since submission.

    Details by event, all counts in tokens unless named otherwise:
        submitted: prompt, priority
        admitted, resumed: row, hit (tokens read from the cache), target (tokens that prefill covers)
        chunk: start, length (when it is dispatched)
        first token: behind the last chunk, a resumed answer's too; noted when it is read
        window: accepted (drafts), kept (added to the answer: fewer where it ended); noted when it is read
        preempted: known (prompt and answer so far)
        finished: reason, generated
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def note(self, answer: int, what: str, **details: int | str) -> None:
        self.events.append(Event(time.monotonic(), answer, what, details))

    def __str__(self) -> str:
        if not self.events:
            return ""
        begin = self.events[0].seconds
        return "\n".join(f"{event.seconds - begin:10.6f} s  {event}" for event in self.events)
