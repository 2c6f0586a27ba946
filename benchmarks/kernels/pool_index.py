"""The k-pool indexer at the released model's shapes: selection alone, and scores with selection."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.harness import Harness, Row
from pallas_kernels import pool_index as op
from pallas_kernels import select_kernel

HEADS, DIM, KPOOL, POOLS_PER_BLOCK = 32, 128, 4, 16
# (rows, pools, target in microseconds): the targets are torch.topk's times on an H200
SELECTIONS = ((32, 8192, 53.0), (32, 65536, None), (8192, 2048, 388.0))
# (name, requests, tokens a request, pools visible to the last token)
BATCHES = (
    ("prefill 8192", 1, 8192, 2048),
    ("prefill 8192 at 128k", 1, 8192, 32768),
    ("decode 1 row at 32k", 1, 1, 8192),
    ("decode 32 rows at 32k", 32, 1, 8192),
    ("verify 32 rows x 4 at 32k", 32, 4, 8192),
    ("decode 128 rows at 32k", 128, 1, 8192),
)


def select(scores: jax.Array, counts: jax.Array, k: int, implementation: str) -> jax.Array:
    return select_kernel.select(scores, counts, k, interpret=implementation == "interpret")


def torch_topk(rows: int, pools: int, k: int) -> Any:
    def set_up(torch: Any) -> Any:
        scores = torch.rand(rows, pools, device="cuda")
        return lambda: torch.topk(scores, k, sorted=False)

    return set_up


def problem(harness: Harness, requests: int, tokens: int, pools: int) -> tuple[jax.Array, ...]:
    """Requests with shuffled blocks; a request's last token sees `pools` pools, the ones before it fewer."""
    total = requests * tokens
    blocks = -(-pools // POOLS_PER_BLOCK)
    keys = jax.random.split(jax.random.key(total + pools), 4)
    q = jax.random.normal(keys[0], (total, HEADS, DIM), jnp.bfloat16)
    head_weights = jax.random.normal(keys[1], (total, HEADS)) * HEADS**-0.5
    pooled = jax.random.normal(keys[2], (2, requests * blocks, POOLS_PER_BLOCK, DIM), jnp.bfloat16)
    tables = jax.random.permutation(keys[3], requests * blocks).reshape(requests, blocks).astype(jnp.int32)
    row_of_token = jnp.repeat(jnp.arange(requests, dtype=jnp.int32), tokens)
    position = pools * KPOOL - tokens + jnp.tile(jnp.arange(tokens, dtype=jnp.int32), requests)
    return q, head_weights, pooled, tables, row_of_token, (position + 1) // KPOOL


def select_paged(q: jax.Array, *arrays: jax.Array, k: int, implementation: str) -> jax.Array:
    head_weights, pooled, *rest = arrays
    return op.select_paged(q, head_weights, pooled, 1, *rest, k, implementation=implementation)


def wrong_pools(ids: jax.Array, problem: tuple[jax.Array, ...], k: int) -> float:
    """The share of pools, over a few tokens, that float64 would not have chosen by more than rounding."""
    q, head_weights, pooled, tables, row_of_token, counts = problem
    wrong = taken = 0
    for token in np.unique(np.linspace(0, q.shape[0] - 1, 4).astype(int)):
        count = int(counts[token])
        keys = pooled[1, tables[row_of_token[token]]].reshape(-1, q.shape[2])[:count]
        keys, query = (np.asarray(x.astype(jnp.float32), np.float64) for x in (keys, q[token]))
        scores = (
            np.asarray(head_weights[token], np.float64) @ np.maximum(query @ keys.T, 0) / q.shape[2] ** 0.5
        )
        chosen = np.asarray(ids[token])
        chosen = chosen[chosen >= 0]
        assert len(set(chosen)) == len(chosen) == min(k, count)
        if count > k:
            edge = np.sort(scores)[-k] - 1e-5 * abs(scores).max()
            wrong += int((scores[chosen] < edge).sum())
        taken += len(chosen)
    return wrong / max(1, taken)


def measure(harness: Harness) -> list[Row]:
    k = harness.size(512, 16)
    rows = []
    for number, pools, target in SELECTIONS:
        number, pools = harness.size(number, 4), harness.size(pools, 64)
        scores = jax.random.normal(jax.random.key(pools), (number, pools))
        counts = jnp.full((number,), pools, jnp.int32)

        def step(counts: jax.Array, scores: jax.Array, k: int = k) -> jax.Array:
            ids = select(scores, counts, k, harness.implementation)
            return counts + jnp.minimum(ids[:, 0], 0)  # zero, but only the ids tell

        peer = harness.torch_seconds(torch_topk(number, pools, k))
        rows.append(
            harness.row(
                f"top {k} of {number} x {pools}",
                harness.seconds(step, counts, scores) * 1e6,
                floor=1e6 * harness.floor(bytes_moved=4.0 * number * (pools + k)),
                target=target,
                peer="torch.topk",
                peer_value=None if peer is None else peer * 1e6,
            )
        )
    for name, requests, tokens, pools in BATCHES:
        requests, tokens, pools = (
            harness.size(requests, 2),
            harness.size(tokens, min(tokens, 5)),
            harness.size(pools, 48),
        )
        arrays = problem(harness, requests, tokens, pools)
        run = functools.partial(select_paged, k=k, implementation=harness.implementation)

        def paged_step(counts: jax.Array, *rest: jax.Array, run: Any = run) -> jax.Array:
            return counts + jnp.minimum(run(*rest, counts)[:, 0], 0)

        scored = float(jnp.where(arrays[5] > k, arrays[5], 0).sum())
        floor = harness.floor(
            bytes_moved=2.0 * DIM * (requests * pools + HEADS * requests * tokens),
            flop=2.0 * scored * HEADS * DIM,
        )
        repeats = 4 if tokens > 1000 else 20
        seconds = harness.seconds(paged_step, arrays[5], *arrays[:5], repeats=repeats)
        rows.append(
            harness.row(
                f"scores and top {k}, {name}",
                seconds * 1e6,
                floor=floor * 1e6,
                target=3e6 * floor if name == "prefill 8192" else None,
                error=wrong_pools(harness.call(run, *arrays), arrays, k),
            )
        )
    return rows
