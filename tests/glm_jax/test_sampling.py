"""Logit processing against a numpy loop: one row, one window position, one token at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.cache import SamplerTables
from glm_jax.sampling import GrammarMask, SamplingRows, process_logits

ROWS, WIDTH, VOCAB, SLOTS = 4, 3, 64, 5
SLOT_OF_ROW = np.array([2, -1, 0, 4])  # the second row is padding
PROCESSED = np.array([True, False, True, False])


def problem(seed: int, width: int):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(ROWS, width, VOCAB)).astype(np.float32)
    logits[0, 0, 5] = -np.inf
    # unused rows hold NaN and garbage, as device memory does
    tables = SamplerTables(
        counts=rng.integers(0, 3, (SLOTS, VOCAB)).astype(np.int32),
        prompt=rng.random((SLOTS, VOCAB)) < 0.3,
        bias=np.where(rng.random((SLOTS, VOCAB)) < 0.2, -np.inf, rng.normal(size=(SLOTS, VOCAB))).astype(
            np.float32
        ),
        ends=rng.random((SLOTS, VOCAB)) < 0.1,
    )
    tables.bias[[1, 3]] = np.nan
    window = rng.integers(0, VOCAB, (ROWS, width)).astype(np.int32)
    window[0, -1] = -1
    if width > 2:
        window[2, 1:] = 7  # a token drafted twice counts twice
    rows = SamplingRows(
        temperature=np.ones(ROWS, np.float32), top_k=np.zeros(ROWS, np.int32),
        top_p=np.ones(ROWS, np.float32), min_p=np.zeros(ROWS, np.float32), seeds=np.zeros(ROWS, np.uint32),
        choices=np.zeros(ROWS, np.int32), repetition=np.array([1.3, 1, 0.8, 1], np.float32),
        frequency=np.array([0.4, 0, -0.2, 0], np.float32), presence=np.array([0.1, 0, 0.7, 0], np.float32),
        ends_from=np.array([12, 0, 11, 0], np.int32), processed=PROCESSED,
    )  # fmt: skip
    positions = 10 + np.arange(width)[None] + np.zeros((ROWS, 1), np.int32)
    words = rng.integers(0, 2**32, (ROWS, width, VOCAB // 32), dtype=np.uint64).astype(np.uint32)
    return logits, tables, rows, window, positions.astype(np.int32), words


def expected(logits, tables, rows, window, positions, words, guided):
    out = logits.astype(np.float64)
    for r, w, v in np.ndindex(*logits.shape):
        value = out[r, w, v]
        if PROCESSED[r]:
            slot = SLOT_OF_ROW[r]
            count = tables.counts[slot, v] + np.sum(window[r, 1 : w + 1] == v)
            if count or tables.prompt[slot, v]:
                value = value / rows.repetition[r] if value > 0 else value * rows.repetition[r]
            value -= rows.frequency[r] * count + rows.presence[r] * (count > 0)
            value += tables.bias[slot, v]
            if positions[r, w] < rows.ends_from[r] and tables.ends[slot, v]:
                value = -np.inf
        if guided and not words[r, w, v // 32] >> np.uint32(v % 32) & 1:
            value = -np.inf
        out[r, w, v] = value
    return out


def run(logits, tables, rows, window, positions, words, guided, axis=None):
    mask = GrammarMask(words, jnp.asarray(guided))
    slots = jnp.asarray(SLOT_OF_ROW, jnp.int32)
    return process_logits(logits, tables, rows, slots, window, positions, mask, axis)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("width", [1, WIDTH])
def test_processing_equals_a_loop(width: int, guided: bool) -> None:
    """1e-6: a handful of float32 operations on values of order one."""
    arrays = jax.tree.map(jnp.asarray, problem(width, width))
    actual = jax.jit(run, static_argnums=6)(*arrays, guided)
    np.testing.assert_allclose(actual, expected(*problem(width, width), guided), rtol=1e-6, atol=1e-6)


def test_a_shard_processes_its_own_part() -> None:
    """Drafts of other shards count nowhere: both halves together are the whole, bit for bit."""
    logits, tables, rows, window, positions, words = problem(9, WIDTH)
    whole = run(*jax.tree.map(jnp.asarray, (logits, tables, rows, window, positions, words)), True)
    halves = jax.tree.map(lambda x: jnp.stack(jnp.split(jnp.asarray(x), 2, axis=-1)), (logits, tables))

    def shard(logits, tables):
        return run(logits, tables, rows, window, positions, words, True, axis="tp")

    parts = jax.vmap(shard, axis_name="tp")(*halves)
    np.testing.assert_array_equal(jnp.concatenate(parts, axis=-1), whole)
