"""Sparse MLA at the released model's shapes: 2,051 rows of 512 channels for every query, 64 heads and 8."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.harness import Harness, Row, relative_error
from pallas_kernels import sparse_mla as op

SCALE = 256**-0.5
TOPK, TAIL = 2048, 3
# (name, queries, heads, quantised latents, target in microseconds)
CASES = (
    ("prefill 8192, 64 heads", 8192, 64, False, 8192 * 64 * TOPK * 2048 / 350e6),
    ("prefill 8192, 64 heads, fp8 latents", 8192, 64, True, None),
    ("prefill 8192, 8 heads", 8192, 8, False, 1400.0),
    ("decode 1 row, 64 heads", 1, 64, False, None),
    ("decode 32 rows, 64 heads", 32, 64, False, 40.0),
    ("decode 32 rows, 64 heads, fp8 latents", 32, 64, True, None),
    ("decode 128 rows, 64 heads", 128, 64, False, None),
    ("decode 32 rows, 8 heads", 32, 8, False, None),
    ("decode 128 rows, 8 heads", 128, 8, False, None),
)


def problem(harness: Harness, queries: int, heads: int, quantized: bool) -> tuple[jax.Array, ...]:
    """Random latents: one context of 32k tokens for prefill, 32 of them for decode.

    Every query picks its 512 pools of 4 rows at random, and 3 tail rows: no two queries share on purpose.
    """
    dim, width = harness.size(512, 128), harness.size(TOPK, 32)
    rows = harness.size(2**15 if queries > 1000 else 2**20, 1024)
    keys = jax.random.split(jax.random.key(queries + heads), 3)
    q = jax.random.normal(keys[0], (queries, heads, dim), jnp.bfloat16)
    latents = jax.random.normal(keys[1], (2, rows, dim), jnp.bfloat16)
    pools = jax.random.randint(keys[2], (queries, width // 4), 0, rows // 4, jnp.int32)
    indices = (pools[..., None] * 4 + jnp.arange(4, dtype=jnp.int32)).reshape(queries, width)
    indices = jnp.concatenate([indices, jnp.broadcast_to(jnp.arange(TAIL), (queries, TAIL))], axis=1)
    if quantized:
        return q, *op.quantize_latents(latents), indices
    return q, latents, None, indices


def attend(
    q: jax.Array, latents: jax.Array, scales: Any, indices: jax.Array, implementation: str
) -> jax.Array:
    return op.sparse_mla(
        q, latents, indices, scale=SCALE, layer=1, latent_scales=scales, implementation=implementation
    )


def error(out: jax.Array, q: jax.Array, latents: jax.Array, scales: Any, indices: jax.Array) -> float:
    """Against float64 on the host, for a few queries."""
    some = np.unique(np.linspace(0, q.shape[0] - 1, 3).astype(int))
    expected = []
    for query in some:
        chosen = op.gather_latents(latents, 1, indices[query], jnp.float32, scales)
        chosen, queries = np.asarray(chosen, np.float64), np.asarray(q[query].astype(jnp.float32), np.float64)
        scores = queries @ chosen.T * SCALE
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected.append(weights @ chosen / weights.sum(-1, keepdims=True))
    return relative_error(out[some], np.stack(expected))


def torch_gather(q: jax.Array, latents: jax.Array, indices: jax.Array) -> Any:
    """The peer: gather, then batched products, in tiles of queries that fit the memory."""

    def set_up(torch: Any) -> Any:
        rows, dim = latents.shape[1:]
        keys = torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16)
        queries = torch.randn(*q.shape, device="cuda", dtype=torch.bfloat16)
        chosen = torch.from_numpy(np.asarray(indices)).to("cuda").long()

        def call() -> None:
            for start in range(0, q.shape[0], 1024):
                part = slice(start, start + 1024)
                gathered = keys[chosen[part]]
                weights = torch.softmax((queries[part] @ gathered.transpose(1, 2)) * SCALE, -1)
                weights @ gathered

        return call

    return set_up


def measure(harness: Harness) -> list[Row]:
    rows = []
    for name, queries, heads, quantized, target in CASES:
        queries = harness.size(queries, min(queries, 3))
        q, latents, scales, indices = problem(harness, queries, heads, quantized)
        step = functools.partial(attend, implementation=harness.implementation)
        seconds = harness.seconds(step, q, latents, scales, indices, repeats=4 if queries > 1000 else 20)
        row_bytes = latents.shape[2] * latents.dtype.itemsize + (0 if scales is None else 4 * scales.shape[2])
        flop = 4.0 * queries * heads * indices.shape[1] * q.shape[2]
        distinct = min(queries * indices.shape[1], latents.shape[1])
        peer = harness.torch_seconds(torch_gather(q, latents, indices)) if not quantized else None
        rows.append(
            harness.row(
                f"sparse MLA {name}",
                seconds * 1e6,
                floor=1e6 * harness.floor(bytes_moved=distinct * row_bytes + 2 * q.size * 2, flop=flop),
                target=target,
                peer="torch gather and matmul",
                peer_value=None if peer is None else peer * 1e6,
                error=error(harness.call(step, q, latents, scales, indices), q, latents, scales, indices),
            )
        )
        rows.append(
            harness.row(
                f"sparse MLA {name}, rate", flop / max(seconds, 1e-9) / 1e12, unit="TFLOP/s", better="higher"
            )
        )
    return rows
