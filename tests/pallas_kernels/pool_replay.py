"""Drives `write_pools` over requests cut into batches and checks the caches against whole prompts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import pool_index
from tests.pallas_kernels import sparse_oracles as oracle

DIM = 8
LAYERS, LAYER = 3, 1
_write = jax.jit(pool_index.write_pools)


@dataclasses.dataclass(frozen=True)
class Batch:
    sizes: list[int]  # tokens wanted of every row
    padding: int  # padding tokens at the end
    order: np.ndarray  # rows' order on the token axis


class Replay:
    """Three requests on shuffled slots and blocks; all that they do not own is NaN and must stay NaN."""

    def __init__(self, kpool: int, ring_rows: int, pools_per_block: int, lengths: tuple[int, ...], seed: int):
        random = np.random.default_rng(seed)
        self.kpool, self.pools_per_block, self.lengths = kpool, pools_per_block, lengths
        self.keys = [random.normal(size=(n, DIM)).astype(np.float32) for n in lengths]
        self.gates = [random.normal(size=(n, DIM)).astype(np.float32) for n in lengths]
        self.ape = random.normal(size=(kpool, DIM)).astype(np.float32)
        self.done = [0] * len(lengths)
        self.slots = random.permutation(6)[: len(lengths)].astype(np.int32)
        block = kpool * pools_per_block
        width = max(1, -(-max(lengths) // block))
        owned = random.permutation(len(lengths) * width + 4).astype(np.int32)
        self.tables = np.full((len(lengths), width + 1), -1, np.int32)
        for row, length in enumerate(lengths):
            used = -(-length // block)
            self.tables[row, :used] = owned[row * width : row * width + used]
        self.ring = jnp.full((LAYERS, 6, ring_rows, 2, DIM), jnp.nan, jnp.float32)
        self.pooled = jnp.full((LAYERS, owned.size, pools_per_block, DIM), jnp.nan, jnp.float32)
        self.random = random
        self.speculative = False

    def finished(self) -> bool:
        return list(self.done) == list(self.lengths)

    def step(self, batch: Batch) -> None:
        sizes = [min(size, n - d) for size, n, d in zip(batch.sizes, self.lengths, self.done, strict=True)]
        bucket = 8 * self.kpool  # few numbers of tokens, few compiled programs
        tokens = -(-(sum(batch.sizes) + batch.padding) // bucket) * bucket
        parts = [(row, self.done[row], sizes[row]) for row in batch.order if sizes[row]]
        keys = [self.keys[row][start : start + size] for row, start, size in parts]
        gates = [self.gates[row][start : start + size] for row, start, size in parts]
        self._write(parts, keys, gates, tokens)
        self.done = [d + s for d, s in zip(self.done, sizes, strict=True)]

    def verify(self, window: int, accepted: np.ndarray) -> None:
        """Every row writes a window: the true next tokens for the accepted part, wrong drafts behind it."""
        self.speculative = True
        parts, keys, gates = [], [], []
        for row, start in enumerate(self.done):
            taken = min(int(accepted[row]), self.lengths[row] - start)
            wrong = self.random.normal(size=(2, window - taken, DIM)).astype(np.float32) * 50
            parts.append((row, start, window))
            keys.append(np.concatenate([self.keys[row][start : start + taken], wrong[0]]))
            gates.append(np.concatenate([self.gates[row][start : start + taken], wrong[1]]))
            self.done[row] += taken
        self._write(parts, keys, gates, window * len(self.lengths))

    def _write(self, parts, keys, gates, tokens: int) -> None:
        total = sum(size for _, _, size in parts)
        row_of_token = np.full(tokens, -1, np.int32)
        positions = np.zeros(tokens, np.int32)
        flat = np.full((2, tokens, DIM), np.nan, np.float32)
        row_starts = np.zeros(len(self.lengths), np.int32)
        at = 0
        for (row, start, size), key, gate in zip(parts, keys, gates, strict=True):
            row_of_token[at : at + size] = row
            positions[at : at + size] = np.arange(start, start + size)
            flat[:, at : at + size] = key, gate
            row_starts[row] = start
            at += size
        assert at == total <= tokens
        self.ring, self.pooled = _write(
            self.ring,
            self.pooled,
            LAYER,
            *flat,
            self.ape,
            row_of_token,
            positions,
            row_starts,
            self.slots,
            self.tables,
        )

    def check(self) -> None:
        ring, pooled = np.asarray(self.ring), np.asarray(self.pooled)
        untouched = np.setdiff1d(
            np.arange(ring.shape[1]), [s for s, n in zip(self.slots, self.lengths, strict=True) if n]
        )
        assert np.isnan(ring[[0, 2]]).all() and np.isnan(ring[LAYER, untouched]).all()
        written = np.zeros(pooled.shape[1:3], bool)
        for row, length in enumerate(self.lengths):
            for pool in range(length // self.kpool):
                members = slice(pool * self.kpool, (pool + 1) * self.kpool)
                expected = oracle.pool_key(self.keys[row][members], self.gates[row][members], self.ape)
                block, place = self.tables[row, pool // self.pools_per_block], pool % self.pools_per_block
                np.testing.assert_allclose(pooled[LAYER, block, place], expected, atol=2e-5, rtol=0)
                written[block, place] = True
            for position in range(length // self.kpool * self.kpool, length):
                stored = ring[LAYER, self.slots[row], position % ring.shape[2]]
                np.testing.assert_array_equal(stored, [self.keys[row][position], self.gates[row][position]])
        assert np.isnan(pooled[[0, 2]]).all()
        if (
            self.speculative
        ):  # a rejected draft may close a pool of its own row past the end; the count hides it
            written[self.tables[self.tables >= 0]] = True
        assert np.isnan(pooled[LAYER, ~written]).all()
