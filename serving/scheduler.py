"""Who runs in the next step, and who holds which row, block and state slot.

A step runs one token window for every answer past its prompt, then spends what is left of the token budget on
prompt chunks, in order of priority and arrival. An answer is admitted when a row, its state slots and the
blocks of everything known of it are free; blocks for what it generates are taken as it grows, and when none
are left the least urgent answer is preempted: it gives everything back and is recomputed later, from the
snapshots it left. Tables are numpy arrays indexed by row; a row is also the answer's request slot.

The device runs dispatched steps in order. Steps whose outputs were not read yet ("unread") still write to
what their answers held, and read it, before anything dispatched later can: giving back needs no waiting.
"""

import bisect
from collections.abc import Iterator

import numpy as np

from serving.engine_config import EngineConfig
from serving.id_pool import IdPool
from serving.plan import Chunk, Plan, Window
from serving.prefix_cache import NO_MATCH, PrefixCache
from serving.request import Answer, Placement, Status

MAX_PREFILL_ROWS = 8
MAX_SNAPSHOTS = 4  # boundaries whose state one chunk can keep


class Scheduler:
    """Waiting and running answers and what they hold. Knows nothing of devices."""

    def __init__(
        self,
        config: EngineConfig,
        cache: PrefixCache,
        *,
        max_model_len: int,
        window: int,
    ) -> None:
        """Raises ValueError if decoding alone could use up the token budget and prompts never get on."""
        rows = config.max_num_seqs
        if config.max_num_batched_tokens < rows * window:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs {rows} x {window} tokens of a decode "
                f"window, got {config.max_num_batched_tokens}"
            )
        if config.block_size < 2 * window:
            raise ValueError(
                f"block_size must be at least two decode windows of {window} tokens, got {config.block_size}"
            )
        self._config = config
        self._cache = cache
        self._window = window
        self.rows = IdPool(rows)
        self.waiting: list[Answer] = []  # most urgent first
        self.running: list[Answer] = []  # most urgent first
        self._closing: list[tuple[Answer, Placement, int]] = []  # finished, last boundary not yet committed
        self.block_tables = np.full((rows, self.blocks_for(max_model_len)), -1, np.int32)
        self._arrivals = 0
        self.preemptions = 0
        self.queries = self.hits = 0  # prompt tokens at first admission: all of them, those from the cache

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._config.block_size)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._closing)

    @property
    def waiting_requests(self) -> int:
        """Requests with an answer that waits; safe on any thread."""
        return len({id(answer.request) for answer in self.waiting})

    @property
    def guided(self) -> bool:
        """Whether a running or waiting answer follows a grammar, which needs every output before it plans."""
        return any(answer.grammar is not None for answer in (*self.running, *self.waiting))

    def add(self, answer: Answer) -> None:
        answer.arrival = self._arrivals
        self._arrivals += 1
        bisect.insort(self.waiting, answer, key=_urgency)

    # --- planning -----------------------------------------------------------------------------------

    def schedule(self, *, may_preempt: bool) -> Plan | None:
        """The next step; what it names counts as dispatched, so every plan must be run, in order.

        None: blocks ran out and `may_preempt` is False. Read every unread output, then ask again with True.
        """
        if not self._grow(may_preempt):
            return None
        windows = [self._window_of(answer) for answer in self.running if self._wants_window(answer)]
        closing = [self._closing_window(*finished) for finished in self._closing]
        budget = self._config.max_num_batched_tokens - (len(windows) + len(closing)) * self._window
        chunks: list[Chunk] = []
        for answer in self.running:
            if answer.placement is not None and not answer.placement.decoding:
                budget = self._add_chunk(answer, answer.placement, budget, chunks)
        for answer in self._admissible():
            if budget <= 0 or len(chunks) == MAX_PREFILL_ROWS or not self._admit(answer):
                break
            assert answer.placement is not None
            budget = self._add_chunk(answer, answer.placement, budget, chunks)
        # Only now: nothing of this very plan may count on what its own dispatches compute or free.
        for chunk in chunks:
            self._dispatched_chunk(chunk)
        for window in windows:
            window.placement.unread += 1
        for finished in self._closing:
            self._close(*finished)
        self._closing.clear()
        return Plan(tuple(chunks), (*windows, *closing))

    def _wants_window(self, answer: Answer) -> bool:
        """Past its prompt, and not certain to be finished by the steps still unread (each draws a token)."""
        place = answer.placement
        return place is not None and place.decoding and place.position + place.unread < answer.request.limit

    def _reach(self, answer: Answer, place: Placement) -> int:
        """Tokens the next window can extend to, whatever the unread steps accept."""
        furthest = place.position + (place.unread + 1) * self._window
        return min(furthest, answer.request.limit)

    def _grow(self, may_preempt: bool) -> bool:
        """Gives every decoding answer the blocks of its next window; False if that needs a preemption."""
        for answer in list(self.running):
            while answer.placement is not None and self._wants_window(answer):
                place = answer.placement
                missing = self.blocks_for(self._reach(answer, place)) - len(place.blocks)
                if missing <= 0:
                    break
                taken = self._cache.take_blocks(missing)
                if taken is not None:
                    self.block_tables[place.row, len(place.blocks) : len(place.blocks) + missing] = taken
                    place.blocks.extend(taken)
                    break
                if not may_preempt:
                    return False
                self.preempt(self.running[-1])
        return True

    def _window_of(self, answer: Answer) -> Window:
        place = answer.placement
        assert place is not None
        publish = place.boundary if place.rolling else -1
        slot = place.rolling[_turn(publish, self._config.block_size)] if place.rolling else -1
        return Window(answer, place, answer.request.limit, publish, slot)

    def _closing_window(self, answer: Answer, place: Placement, boundary: int) -> Window:
        return Window(answer, place, 0, boundary, place.rolling[_turn(boundary, self._config.block_size)])

    def _add_chunk(self, answer: Answer, place: Placement, budget: int, chunks: list[Chunk]) -> int:
        """Plans the answer's next chunk if there is room; returns the budget left."""
        start = place.scheduled
        stop = min(place.target, start + budget)
        # the state at every kept boundary is computed: a chunk with more of them than it can store is cut
        inside = [(b, regular) for b, regular in place.snapshot_at if start < b <= stop]
        if len(inside) > MAX_SNAPSHOTS:
            stop = inside[MAX_SNAPSHOTS - 1][0]
            inside = inside[:MAX_SNAPSHOTS]
        if stop <= start or len(chunks) == MAX_PREFILL_ROWS:
            return budget
        snapshots = []
        for boundary, _ in inside:
            slot = self._cache.states.take()
            if slot is not None:
                snapshots.append((boundary - start, slot))
        initial = place.initial_slot if start == place.resumed_at else place.state_slot
        chunks.append(Chunk(answer, place, start, stop - start, initial, tuple(snapshots)))
        return budget - (stop - start)

    def _dispatched_chunk(self, chunk: Chunk) -> None:
        """What a planned chunk computes becomes readable to later plans."""
        place, answer = chunk.placement, chunk.answer
        end = chunk.start + chunk.length
        place.scheduled = end
        answer.note("chunk", start=chunk.start, length=chunk.length)
        regular = dict(place.snapshot_at)
        if place.caching:
            self._cache.publish_blocks(answer, end)
        for after, slot in chunk.snapshots:
            boundary = chunk.start + after
            self._cache.publish_state(answer, boundary, slot, regular=regular[boundary])
        if chunk.last:
            place.position = place.target
            if place.rolling:
                size = self._config.block_size
                place.boundary = (place.target // size + 1) * size

    # --- admission ----------------------------------------------------------------------------------

    def _admissible(self) -> Iterator[Answer]:
        """Waiting answers, most urgent first; an answer waits while a sibling computes their prompt."""
        for answer in list(self.waiting):
            if not any(self._prefills(sibling) for sibling in answer.request.answers):
                yield answer

    @staticmethod
    def _prefills(answer: Answer) -> bool:
        return answer.placement is not None and not answer.placement.decoding

    def _admit(self, answer: Answer) -> bool:
        """Gives the answer a row, state slots and the blocks of all its known tokens, or nothing at all."""
        caching = self._caches(answer)
        match = self._cache.match(answer) if caching and self._reads_cache(answer) else NO_MATCH
        target = answer.known_tokens
        slots = self._config.slots_per_seq
        fresh = self.blocks_for(target) - len(match.blocks)
        if not self.rows.available or self._cache.states.available < slots:
            return False
        self._cache.blocks.hold(match.blocks)
        taken = self._cache.take_blocks(fresh)
        if taken is None:
            self._cache.blocks.release(match.blocks)
            return False
        rows = self.rows.take(1)
        states = [self._cache.states.take() for _ in range(slots)]
        assert rows is not None
        owned = [slot for slot in states if slot is not None]
        place = Placement(
            row=int(rows[0]),
            blocks=[*match.blocks, *taken],
            state_slot=owned[0],
            initial_slot=match.state_slot,
            resumed_at=match.boundary,
            target=target,
            snapshot_at=(self._cache.snapshot_boundaries(match.boundary, target, match) if caching else ()),
            caching=caching,
            scheduled=match.boundary,
            published=len(match.blocks),
            rolling=owned[1:],
        )
        self.block_tables[place.row] = -1
        self.block_tables[place.row, : len(place.blocks)] = place.blocks
        answer.placement = place
        answer.status = Status.RUNNING
        self.waiting.remove(answer)
        bisect.insort(self.running, answer, key=_urgency)
        what = "resumed" if answer.admitted else "admitted"
        answer.note(what, row=place.row, hit=match.boundary, target=target)
        if not answer.admitted:
            answer.admitted = True
            self.queries += target
            self.hits += match.boundary
            if answer.index == 0:
                answer.request.cached_tokens["device"] = match.boundary
        return True

    def _caches(self, answer: Answer) -> bool:
        """Without prefix caching only the answers to one request share, under a root of their own."""
        return self._config.enable_prefix_caching or len(answer.request.answers) > 1

    @staticmethod
    def _reads_cache(answer: Answer) -> bool:
        """Prompt log-probabilities need every prompt token run."""
        return answer.request.sampling.prompt_logprobs is None

    # --- outcomes -----------------------------------------------------------------------------------

    def read_window(self, window: Window, count: int) -> None:
        """A window's output was read: it committed `count` tokens. What they complete becomes readable."""
        place = window.placement
        place.unread -= 1
        size = self._config.block_size
        if place.rolling and 0 <= place.boundary <= place.position:
            # the window's replay committed tokens up to its own start, across the boundary
            place.rolling_at[_turn(place.boundary, size)] = place.boundary
            place.boundary += size
        place.position += count

    def publish_answer(self, answer: Answer) -> None:
        """Blocks that decoding has completed become readable."""
        place = answer.placement
        if place is not None and place.caching and place.decoding:
            # a block is complete once the token behind it is known: the MTP layer's last row depends on it
            self._cache.publish_blocks(answer, min(place.position, answer.known_tokens - 1))

    def finish(self, answer: Answer) -> None:
        """Ends the answer wherever it is in its life; what it holds is given back, at the latest when the
        next plan has committed its last boundary."""
        if answer.status is Status.WAITING:
            self.waiting.remove(answer)
        place = answer.placement
        if place is not None:
            self.running.remove(answer)
            if answer.finish_reason == "error":
                self._cache.withdraw(answer)
            else:
                self.publish_answer(answer)
            boundary = self._last_boundary(answer, place)
            if boundary is not None and place.rolling_at[self._turn_of(boundary)] != boundary:
                if place.unread:
                    # a dispatched window has committed it: its replay ran up to the position read last
                    self._close(answer, place, boundary)
                else:
                    self._closing.append((answer, place, boundary))
            elif boundary is not None:
                self._close(answer, place, boundary)
            else:
                self._release(place)
            answer.placement = None
        answer.status = Status.FINISHED

    def _last_boundary(self, answer: Answer, place: Placement) -> int | None:
        """The last boundary of a finished answer, None if prefill kept it or nothing is to be kept."""
        if not place.rolling or not place.decoding or answer.finish_reason not in ("stop", "length"):
            return None
        size = self._config.block_size
        boundary = min(answer.known_tokens - 1, place.position) // size * size
        return boundary if boundary > place.target else None

    def _turn_of(self, boundary: int) -> int:
        return _turn(boundary, self._config.block_size)

    def _close(self, answer: Answer, place: Placement, boundary: int) -> None:
        """Publishes the snapshot at `boundary` and gives everything back."""
        slot = place.rolling.pop(self._turn_of(boundary))
        self._cache.publish_state(answer, boundary, slot, regular=False)
        self._release(place)

    def preempt(self, answer: Answer) -> None:
        """Takes everything back from a running answer, all of whose outputs were read; it waits again."""
        place = answer.placement
        assert place is not None and place.unread == 0
        self.running.remove(answer)
        boundary = max(place.rolling_at)
        if place.rolling and boundary > 0:
            self.publish_answer(answer)
            slot = place.rolling.pop(self._turn_of(boundary))
            self._cache.publish_state(answer, boundary, slot, regular=False)
        self._release(place)
        answer.placement = None
        answer.status = Status.WAITING
        answer.preemptions += 1
        answer.note("preempted", known=answer.known_tokens)
        self.preemptions += 1
        bisect.insort(self.waiting, answer, key=_urgency)

    def _release(self, place: Placement) -> None:
        self._cache.blocks.release(place.blocks)
        for slot in (place.state_slot, *place.rolling):
            self._cache.states.give_back(slot)
        self.rows.give_back(np.array([place.row]))
        self.block_tables[place.row] = -1


def _urgency(answer: Answer) -> tuple[int, int]:
    return answer.request.priority, answer.arrival


def _turn(boundary: int, block_size: int) -> int:
    """Which of the two rolling slots holds a boundary."""
    return boundary // block_size % 2
