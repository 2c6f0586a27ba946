"""A device that needs no model: the next token is a hash of all tokens before it.

It keeps every leg a real device keeps, as contents that can be checked: a cache row per position (which
tokens it was computed from), a state per slot (which tokens it has seen), window records, row state with
drafts that are wrong on purpose. Every step recomputes what it reads and fails where anything is stale,
foreign, missing or half there; outputs then equal `answer_to` whatever the engine did.
"""

import dataclasses
import hashlib
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from glm_jax.cache import SamplerTables
from glm_jax.sampling import Logprobs
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
    """A request slot: row state and window records."""

    position: int = -1
    accepted: int = 0
    window: tuple[int, ...] = ()
    records: tuple[int, ...] = ()


class FakeDevice:
    def __init__(
        self,
        block_size: int,
        next_token: NextToken = hashed_token,
        *,
        drafts: int = 0,
        right: float = 0.6,
        seed: int = 0,
    ) -> None:
        """`right`: how likely each draft is right."""
        self.window = drafts + 1
        self.block_size = block_size
        self.next_token = next_token
        self.chance = random.Random(seed)
        self.right = right
        # (block, offset) -> the tokens up to and including that position; the target's rows and MTP's apart
        self.target: dict[tuple[int, int], tuple[int, ...]] = {}
        self.mtp: dict[tuple[int, int], tuple[int, ...]] = {}
        self.states: dict[int, tuple[int, ...]] = {}
        self.rows: dict[int, Row] = {}
        self.shapes: set[tuple[str, int]] = set()  # one compiled program each
        self.compiled: set[tuple[str, int]] = set()  # before any step ran
        self.prefills: list[int] = []  # tokens of each prefill
        self.steps = 0
        self.fail_at: int | None = None
        self.pause_s = 0.0  # what a step takes
        self.sick: set[int] = set()  # tokens whose logits are NaN
        self.tables: list[tuple[int, SamplerTables]] = []  # what was written for which row

    # --- the runner's face --------------------------------------------------------------------------

    def compile(self, prefills: Sequence[PrefillBatch], decodes: Sequence[DecodeBatch]) -> list[float]:
        self.compiled = {("prefill", batch.tokens.shape[0]) for batch in prefills}
        self.compiled |= {("decode", batch.request_slots.shape[0]) for batch in decodes}
        return [0.0] * (len(prefills) + len(decodes))

    def prefill(self, batch: PrefillBatch) -> StepOutput:
        self._count("prefill", batch.tokens)
        rows = batch.request_slots.shape[0]
        out = self._outputs(rows)
        cu = np.asarray(batch.cu_seqlens)
        assert cu[0] == 0 and (np.diff(cu) >= 0).all() and (batch.row_of_token[cu[-1] :] == -1).all()
        live = np.flatnonzero(np.asarray(batch.request_slots) >= 0)
        assert live.tolist() == list(range(len(live))), "padding rows come last"
        if len(live):
            self.prefills.append(int(cu[-1]))
        before = dict(self.states)  # a chunk reads states as they were before this step
        written: set[int] = set()
        for i in live:
            self._prefill_row(batch, i, cu, before, written, out)
        self._owned_alone(batch)
        return self._output(out, hidden=np.asarray(batch.positions))

    def decode(self, batch: DecodeBatch) -> StepOutput:
        self._count("decode", batch.request_slots)
        rows = batch.request_slots.shape[0]
        out = self._outputs(rows)
        for i in range(rows):
            if batch.request_slots[i] >= 0:
                self._decode_row(batch, i, out)
        self._owned_alone(batch)
        return self._output(out)

    def logprobs(self, output: StepOutput) -> Logprobs:
        return _logprobs(np.asarray(output.tokens), np.asarray(output.logits))

    def prompt_logprobs(self, hidden: Any, targets: np.ndarray) -> Logprobs:
        return _logprobs(np.asarray(targets), np.asarray(hidden))

    def write_sampler_row(self, row: int, tables: SamplerTables) -> None:
        self.tables.append((row, tables))

    # --- rows ---------------------------------------------------------------------------------------

    def _prefill_row(self, batch, i, cu, before, written, out) -> None:
        part, start = slice(cu[i], cu[i + 1]), int(batch.row_starts[i])
        chunk = batch.tokens[part].tolist()
        assert chunk and (batch.row_of_token[part] == i).all()
        assert batch.positions[part].tolist() == list(range(start, start + len(chunk)))
        follows = batch.next_tokens[part].tolist()
        assert follows[:-1] == chunk[1:] and (follows[-1] == -1) == bool(batch.sample[i])
        initial = int(batch.initial_slots[i])
        tokens = () if initial < 0 else before[initial]
        assert len(tokens) == start, "the state to continue from is of another position"
        table = batch.block_tables[i]
        self._check_context(table, tokens)
        for token in chunk:
            tokens = (*tokens, token)
            self._write(self.target, table, tokens)
        self.states[int(batch.state_slots[i])] = tokens
        written.add(int(batch.state_slots[i]))
        for after, slot in zip(batch.snapshot_after[i], batch.snapshot_slots[i], strict=True):
            if slot >= 0:
                assert 1 <= after <= len(chunk) and int(slot) not in written
                written.add(int(slot))
                self.states[int(slot)] = tokens[: start + after]
        row = self.rows.setdefault(int(batch.request_slots[i]), Row())
        if batch.sample[i]:
            drawn = self._draw(tokens, batch, i, 0, out)
            out["counts"][i], out["tokens"][i, 0] = 1, drawn
            row.position, row.accepted = len(tokens), 0
            row.window = (drawn, *self._drafts((*tokens, drawn), batch, i))
            out["drafts"][i] = row.window[1:]
            follows[-1] = drawn
        for position in range(start, start + len(chunk)):
            self._write(self.mtp, table, tokens[: position + 1])

    def _decode_row(self, batch, i, out) -> None:
        row = self.rows[int(batch.request_slots[i])]
        slot, table, limit = int(batch.state_slots[i]), batch.block_tables[i], int(batch.limits[i])
        committed = self.states[slot]
        replayed = (*committed, *row.records[: row.accepted])
        assert len(replayed) == row.position, "the committed state and the row state disagree"
        boundary = int(batch.publish_positions[i])
        if len(committed) < boundary <= len(replayed):
            self.states[int(batch.publish_slots[i])] = replayed[:boundary]
        self.states[slot] = replayed
        row.records, row.accepted = row.window, 0
        if row.position >= limit:
            return
        self._check_context(table, replayed)
        tokens = replayed
        drawn: list[int] = []
        for offset, token in enumerate(row.window):
            if row.position + offset >= limit or (offset and token != drawn[-1]):
                # rejected or past the limit: rows of rejected drafts are written all the same
                for rest in range(offset, min(self.window, limit - row.position)):
                    self._write(self.target, table, (*replayed, *row.window[: rest + 1]))
                break
            tokens = (*tokens, token)
            self._write(self.target, table, tokens)
            drawn.append(self._draw(tokens, batch, i, offset, out))
        for count in range(row.position + 1, len(tokens) + 1):
            self._write(self.mtp, table, tokens[:count])
        out["counts"][i] = len(drawn)
        out["tokens"][i, : len(drawn)] = drawn
        row.accepted = len(drawn)
        row.position += len(drawn)
        row.window = (drawn[-1], *self._drafts((*tokens, drawn[-1]), batch, i))
        out["drafts"][i] = row.window[1:]

    def _check_context(self, table: np.ndarray, tokens: tuple[int, ...]) -> None:
        """Every cache row below the next position holds what this very sequence put there."""
        for position in range(len(tokens)):
            place = self._place(table, position)
            assert self.target.get(place) == tokens[: position + 1], f"stale cache row at {position}"
            # the MTP row at the last position depends on the token after it, which may have been another one
            assert self.mtp.get(place) == tokens[: position + 1], f"stale MTP row at {position}"

    def _write(self, leg: dict, table: np.ndarray, tokens: tuple[int, ...]) -> None:
        leg[self._place(table, len(tokens) - 1)] = tokens

    def _place(self, table: np.ndarray, position: int) -> tuple[int, int]:
        block = int(table[position // self.block_size])
        assert block >= 0, f"position {position} has no block"
        return block, position % self.block_size

    def _draw(self, tokens, batch, i, offset, out) -> int:
        seed = 0 if batch.sampling.temperature[i] == 0 else int(batch.sampling.seeds[i]) + 1
        token = self.next_token(tokens, seed + int(batch.sampling.choices[i]))
        out["positions"][i, offset] = len(tokens) - 1
        if batch.grammar is not None and batch.grammar.active:
            words = batch.grammar.words[i, offset]
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            if token not in allowed:
                token = int(allowed[token % len(allowed)])
        if token in self.sick:
            out["healthy"][i] = False
        return token

    def _drafts(self, tokens, batch, i) -> list[int]:
        drafts: list[int] = []
        for _ in range(self.window - 1):
            seed = 0 if batch.sampling.temperature[i] == 0 else int(batch.sampling.seeds[i]) + 1
            right = self.next_token((*tokens, *drafts), seed + int(batch.sampling.choices[i]))
            drafts.append(right if self.chance.random() < self.right else (right + 1) % 97)
        return drafts

    # --- bookkeeping --------------------------------------------------------------------------------

    def _outputs(self, rows: int) -> dict[str, np.ndarray]:
        return {
            "tokens": np.zeros((rows, self.window), np.int32),
            "counts": np.zeros(rows, np.int32),
            "healthy": np.ones(rows, bool),
            "drafts": np.zeros((rows, self.window - 1), np.int32),
            "positions": np.full((rows, self.window), -1, np.int32),
        }

    def _output(self, out: dict[str, np.ndarray], hidden: np.ndarray | None = None) -> StepOutput:
        """Positions stand in for the logits and hidden states there: log-probabilities can tell them."""
        positions = out.pop("positions")
        return StepOutput(starts=None, logits=positions, hidden=hidden, **out)

    def _count(self, phase: str, array: object) -> None:
        self.shapes.add((phase, np.shape(array)[0]))
        self.steps += 1
        time.sleep(self.pause_s)
        if self.steps == self.fail_at:
            raise RuntimeError("the device is gone")

    @staticmethod
    def _owned_alone(batch: PrefillBatch | DecodeBatch) -> None:
        """No two live rows share a row or a state slot that they write."""
        for ids in (batch.request_slots, batch.state_slots):
            live = [i for i in np.asarray(ids).tolist() if i >= 0]
            assert len(set(live)) == len(live)


def logprob_of(token: int, position: int) -> float:
    """What the fake device reports for `token` as the successor of the token at `position`."""
    return -float(1 + token + 1000 * position)


def _logprobs(tokens: np.ndarray, positions: np.ndarray) -> Logprobs:
    values = -(1.0 + tokens + 1000.0 * positions)
    best = np.broadcast_to(np.arange(20), (*tokens.shape, 20))
    return Logprobs(values, np.ones(tokens.shape, int), best, -1.0 - best)
