"""Causal and pool-masked MLA: a prompt of 8,192 tokens from its start, dense prompts of 2,048."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.harness import Harness, Row, relative_error
from pallas_kernels import causal_mla as op
from pallas_kernels import sparse_mla

SCALE, BLOCK, KPOOL = 256**-0.5, 64, 4
# (name, tokens, heads, pools chosen or None for dense, target in microseconds)
CASES = (
    ("masked prefill 8192, 8 heads", 8192, 8, 512, 1400.0),
    ("dense prefill 2048, 8 heads", 2048, 8, None, None),
    ("dense prefill 2048, 64 heads", 2048, 64, None, None),
)


def problem(harness: Harness, tokens: int, heads: int, chosen: int | None) -> tuple[Any, ...]:
    """One prompt over shuffled blocks; every token chooses its pools at random among those it sees."""
    dim = harness.size(512, 128)
    keys = jax.random.split(jax.random.key(tokens + heads), 4)
    q = jax.random.normal(keys[0], (tokens, heads, dim), jnp.bfloat16)
    blocks = -(-tokens // BLOCK)
    latents = jax.random.normal(keys[1], (2, blocks * BLOCK, dim), jnp.bfloat16)
    tables = jax.random.permutation(keys[2], blocks).astype(jnp.int32)[None]
    positions = jnp.arange(tokens, dtype=jnp.int32)
    bits = None
    if chosen is not None:
        pools = -(-tokens // KPOOL)
        seen = jnp.arange(pools) < (positions[:, None] + 1) // KPOOL
        score = jnp.where(seen, jax.random.uniform(keys[3], (tokens, pools)), -1.0)
        best, ids = jax.lax.top_k(score, min(chosen, pools))
        bits = op.pool_bits(jnp.where(best >= 0, ids, -1).astype(jnp.int32), pools)
    return q, latents, tables, jnp.zeros(tokens, jnp.int32), positions, bits


def attend(q: jax.Array, latents: jax.Array, *arrays: Any, implementation: str) -> jax.Array:
    tables, row_of_token, positions, bits = arrays
    return op.causal_mla(
        q, latents, tables, row_of_token, positions, block_size=BLOCK, scale=SCALE, layer=1, chosen=bits,
        kpool=KPOOL, implementation=implementation,
    )  # fmt: skip


def error(out: jax.Array, arrays: tuple[Any, ...]) -> float:
    """Against float64 on the host, for a few tokens."""
    q, latents, tables, row_of_token, positions, bits = arrays
    some = np.unique(np.linspace(0, q.shape[0] - 1, 3).astype(int))
    rows = op.visible_rows(
        tables, row_of_token[some], positions[some], BLOCK, None if bits is None else bits[some], KPOOL
    )
    expected = []
    for token, chosen in zip(some, np.asarray(rows), strict=True):
        seen = sparse_mla.gather_latents(latents, 1, chosen[chosen >= 0], jnp.float32)
        keys, queries = np.asarray(seen, np.float64), np.asarray(q[token].astype(jnp.float32), np.float64)
        weights = np.exp((scores := queries @ keys.T * SCALE) - scores.max(-1, keepdims=True))
        expected.append(weights @ keys / weights.sum(-1, keepdims=True))
    return relative_error(out[some], np.stack(expected))


def measure(harness: Harness) -> list[Row]:
    rows = []
    for name, tokens, heads, chosen, target in CASES:
        tokens = harness.size(tokens, 40)
        arrays = problem(harness, tokens, heads, chosen if chosen is None else harness.size(chosen, 4))
        step = functools.partial(attend, implementation=harness.implementation)
        seconds = harness.seconds(step, *arrays, repeats=4)
        pairs = tokens * (tokens + 1) / 2 if chosen is None else tokens * harness.size(2048, 16)
        moved = 2.0 * 2 * arrays[0].size + 2.0 * arrays[1].size / 2
        rows.append(
            harness.row(
                name,
                seconds * 1e6,
                floor=1e6 * harness.floor(bytes_moved=moved, flop=4.0 * pairs * heads * arrays[0].shape[2]),
                target=target,
                error=error(harness.call(step, *arrays), arrays),
            )
        )
    return rows
