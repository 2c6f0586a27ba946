"""Who runs in the next step: first come, first served, with prompts in chunks beside the running answers.

A step runs one token window for every answer past its prompt, then spends what is left of the token budget on
prompt chunks, oldest first. An answer is admitted when a row, its slots and all the blocks it can ever need
are free, so nothing that runs can be starved of memory. Tables are numpy arrays indexed by row; a row is also
the answer's request slot.
"""

import dataclasses
from collections import deque

import numpy as np

from serving.engine_config import EngineConfig
from serving.id_pool import IdPool
from serving.request import Answer, Status

MAX_PREFILL_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Prompt tokens [start, start + length) of an answer; `last` reaches the prompt's end and draws a
    token."""

    answer: Answer
    start: int
    length: int

    @property
    def last(self) -> bool:
        return self.start + self.length == len(self.answer.request.prompt)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One engine step: at most one prefill dispatch, then one decode dispatch."""

    prefill: tuple[Chunk, ...]
    decode: tuple[Answer, ...]


class Scheduler:
    """Waiting and running answers and who owns which block and slot. Knows nothing of devices."""

    def __init__(self, config: EngineConfig, *, num_blocks: int, max_model_len: int, window: int) -> None:
        """Raises ValueError if decoding alone could use up the token budget and prompts never get on."""
        rows = config.max_num_seqs
        if config.max_num_batched_tokens < rows * window:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs {rows} x {window} tokens of a decode "
                f"window, got {config.max_num_batched_tokens}"
            )
        self._config = config
        self._window = window
        self.blocks = IdPool(num_blocks)
        self.state_slots = IdPool(rows)
        self.rows = IdPool(rows)
        self.waiting: deque[Answer] = deque()
        self.running: list[Answer] = []  # oldest first
        self.block_tables = np.full((rows, self.blocks_for(max_model_len)), -1, np.int32)
        self.state_slot = np.full(rows, -1, np.int32)
        self.prefilled = np.zeros(rows, np.int32)  # prompt tokens scheduled so far

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._config.block_size)

    def add(self, answer: Answer) -> None:
        self.waiting.append(answer)

    def schedule(self) -> Plan:
        """The next step. Chunks it names count as done: every plan must be run, in order."""
        decode = tuple(answer for answer in self.running if self._in_decode(answer))
        budget = self._config.max_num_batched_tokens - len(decode) * self._window
        chunks: list[Chunk] = []
        for answer in self.running:
            if not self._in_decode(answer):
                budget = self._add_chunk(answer, budget, chunks)
        while self.waiting and budget > 0 and len(chunks) < MAX_PREFILL_ROWS and self._admit(self.waiting[0]):
            budget = self._add_chunk(self.waiting.popleft(), budget, chunks)
        return Plan(tuple(chunks), decode)

    def finish(self, answer: Answer) -> None:
        """Frees what the answer holds, wherever it is in its life."""
        if answer.status is Status.WAITING:
            self.waiting.remove(answer)
        elif answer.status is Status.RUNNING:
            self.running.remove(answer)
            row = answer.slot
            table = self.block_tables[row]
            self.blocks.give_back(table[table >= 0])
            self.state_slots.give_back(self.state_slot[row : row + 1])
            self.rows.give_back(np.array([row]))
            table[:] = -1
            self.state_slot[row] = -1
            answer.slot = -1
        answer.status = Status.FINISHED

    def _in_decode(self, answer: Answer) -> bool:
        return int(self.prefilled[answer.slot]) == len(answer.request.prompt)

    def _add_chunk(self, answer: Answer, budget: int, chunks: list[Chunk]) -> int:
        """Plans the answer's next chunk if there is room; returns the budget left."""
        start = int(self.prefilled[answer.slot])
        spacing = self._config.snapshot_spacing
        length = min(len(answer.request.prompt) - start, budget, spacing - start % spacing)
        if length <= 0 or len(chunks) == MAX_PREFILL_ROWS:
            return budget
        chunks.append(Chunk(answer, start, length))
        self.prefilled[answer.slot] += length
        return budget - length

    def _admit(self, answer: Answer) -> bool:
        """Gives the answer a row, a state slot and its blocks, or nothing at all."""
        needed = self.blocks_for(answer.request.limit)
        if not self.rows.available or not self.state_slots.available or self.blocks.available < needed:
            return False
        rows, states, blocks = self.rows.take(1), self.state_slots.take(1), self.blocks.take(needed)
        assert rows is not None and states is not None and blocks is not None
        row = answer.slot = int(rows[0])
        self.state_slot[row] = states[0]
        self.block_tables[row, :needed] = blocks
        self.prefilled[row] = 0
        answer.status = Status.RUNNING
        self.running.append(answer)
        return True
