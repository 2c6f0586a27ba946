"""What one engine step dispatches."""

import dataclasses

from serving.request import Answer, Placement


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Known tokens [start, start + length) of an answer; the last chunk draws the next token."""

    answer: Answer
    placement: Placement
    start: int
    length: int
    initial_slot: int  # state slot it continues from, -1 for empty state
    snapshots: tuple[tuple[int, int], ...]  # (tokens of the chunk, state slot) to keep on the way

    @property
    def last(self) -> bool:
        return self.start + self.length == self.placement.target


@dataclasses.dataclass(frozen=True)
class Window:
    """One verify window of a decoding answer; `limit` 0 commits a finished answer's last one, no more."""

    answer: Answer
    placement: Placement
    limit: int
    publish_position: int  # block boundary whose state is kept if this step's replay crosses it, -1 none
    publish_slot: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """At most one prefill dispatch, then one decode dispatch."""

    prefill: tuple[Chunk, ...]
    decode: tuple[Window, ...]

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)
