"""A device that needs no model: the next token is a hash of all tokens before it.

It keeps what a real device keeps (a history per request slot) and checks every batch against it: chunks must
continue where the last one ended, live rows must own their slots and blocks alone, nothing runs past its
limit.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from glm_jax.steps import DecodeBatch, PrefillBatch, StepOutput

NextToken = Callable[[Sequence[int], int], int]


def hashed_token(tokens: Sequence[int], seed: int, vocabulary: int = 97) -> int:
    digest = hashlib.blake2b(np.array([seed, *tokens], np.int64).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % vocabulary


def answer_to(
    prompt: Sequence[int], count: int, next_token: NextToken = hashed_token, seed: int = 0
) -> list[int]:
    """`count` tokens after a prompt, by the definition alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


@dataclasses.dataclass
class Row:
    tokens: list[int]
    state_slot: int
    blocks: tuple[int, ...]
    limit: int


class FakeRunner:
    def __init__(self, block_size: int, next_token: NextToken = hashed_token, window: int = 1) -> None:
        self.window = window
        self.block_size = block_size
        self.next_token = next_token
        self.rows: dict[int, Row] = {}
        self.shapes: set[tuple[str, int]] = set()  # one compiled program each
        self.most_tokens = 0
        self.fail_at: int | None = None
        self.steps = 0

    def prefill(self, batch: PrefillBatch) -> StepOutput:
        self._count("prefill", batch.tokens)
        rows = batch.request_slots.shape[0]
        tokens, counts = np.zeros((rows, self.window), np.int32), np.zeros(rows, np.int32)
        cu = np.asarray(batch.cu_seqlens)
        assert cu[0] == 0 and (np.diff(cu) >= 0).all() and (batch.row_of_token[cu[-1] :] == -1).all()
        live = np.flatnonzero(np.asarray(batch.request_slots) >= 0)
        assert live.tolist() == list(range(len(live))), "padding rows come last"
        for i in live:
            part, start = slice(cu[i], cu[i + 1]), int(batch.row_starts[i])
            chunk = batch.tokens[part].tolist()
            assert chunk and (batch.row_of_token[part] == i).all()
            assert batch.positions[part].tolist() == list(range(start, start + len(chunk)))
            follows = batch.next_tokens[part].tolist()
            assert follows[:-1] == chunk[1:] and (follows[-1] == -1) == bool(batch.sample[i])
            slot, state = int(batch.request_slots[i]), int(batch.state_slots[i])
            blocks = tuple(b for b in batch.block_tables[i].tolist() if b >= 0)
            if start == 0:
                assert batch.initial_slots[i] == -1
                self.rows[slot] = Row([], state, blocks, int(batch.limits[i]))
            else:
                assert batch.initial_slots[i] == state
            row = self.rows[slot]
            assert len(row.tokens) == start
            assert (row.state_slot, row.blocks, row.limit) == (state, blocks, batch.limits[i])
            row.tokens += chunk
            assert len(row.tokens) <= row.limit <= len(blocks) * self.block_size
            if batch.sample[i]:
                counts[i], tokens[i, 0] = 1, self._draw(row, batch, i)
        self._owned_alone(self.rows[int(batch.request_slots[i])] for i in live)
        return StepOutput(tokens, counts)  # type: ignore[arg-type]

    def decode(self, batch: DecodeBatch) -> StepOutput:
        self._count("decode", batch.request_slots)
        rows = batch.request_slots.shape[0]
        tokens, counts = np.zeros((rows, self.window), np.int32), np.zeros(rows, np.int32)
        live = [i for i in range(rows) if batch.request_slots[i] >= 0]
        for i in live:
            row = self.rows[int(batch.request_slots[i])]
            assert row.state_slot == batch.state_slots[i]
            assert row.blocks == tuple(b for b in batch.block_tables[i].tolist() if b >= 0)
            # The newest token is drawn but not yet run: it stands at position len - 1.
            while counts[i] < self.window and len(row.tokens) - 1 < row.limit:
                tokens[i, counts[i]] = self._draw(row, batch, i)
                counts[i] += 1
        self._owned_alone(self.rows[int(batch.request_slots[i])] for i in live)
        return StepOutput(tokens, counts)  # type: ignore[arg-type]

    def _draw(self, row: Row, batch: PrefillBatch | DecodeBatch, i: int) -> int:
        seed = 0 if batch.sampling.temperature[i] == 0 else int(batch.sampling.seeds[i]) + 1
        token = self.next_token(row.tokens, seed + int(batch.sampling.choices[i]))
        row.tokens.append(token)
        return token

    def _count(self, phase: str, array: object) -> None:
        size = np.shape(array)[0]  # type: ignore[arg-type]
        self.shapes.add((phase, size))
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("the device is gone")

    @staticmethod
    def _owned_alone(rows: object) -> None:
        live = list(rows)  # type: ignore[call-overload]
        blocks = [block for row in live for block in row.blocks]
        states = [row.state_slot for row in live]
        assert len(set(blocks)) == len(blocks) and len(set(states)) == len(states)
