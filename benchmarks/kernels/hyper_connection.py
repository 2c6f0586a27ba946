"""One hyper-connection boundary at the released model's shapes: four streams of 4096 channels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.harness import Harness, Row, relative_error
from pallas_kernels import hyper_connection as op
from pallas_kernels import hyper_connection_kernel as kernel

OPTIONS = {"norm_eps": 1e-5, "hc_eps": 1e-6, "sinkhorn_iterations": 20}
# (tokens, target in floors, target in microseconds)
CASES = ((1, None, None), (32, None, 15.0), (128, None, None), (8192, 1.8, None))


def problem(harness: Harness, tokens: int) -> tuple[jax.Array, ...]:
    """(streams, out, post, comb, fn, base, scale); comb is doubly stochastic, so repeats stay bounded."""
    dim = harness.size(4096, 128)
    keys = jax.random.split(jax.random.key(tokens), 4)
    return (
        jax.random.normal(keys[0], (tokens, 4, dim), jnp.bfloat16),
        jax.random.normal(keys[1], (tokens, dim), jnp.bfloat16),
        jnp.full((tokens, 4), 0.1),
        jnp.full((tokens, 4, 4), 0.25),
        jax.random.normal(keys[2], (24, 4 * dim), jnp.bfloat16) * (4 * dim) ** -0.5,
        jax.random.normal(keys[3], (24,)),
        jnp.array([0.7, 1.1, 0.9]),
    )


def boundary(harness: Harness, arrays: tuple, plan: kernel.Plan | None = None) -> tuple[jax.Array, ...]:
    """(streams, hidden, post, comb) after `post` of one block and `pre` of the next."""
    streams, out, post, comb, fn, base, scale = arrays
    if plan is not None:
        return kernel.hyper_connection_triton(
            streams, fn, base, scale, (out, post, comb), **OPTIONS, interpret=harness.tiny, plan=plan
        )
    return op.hyper_connection_post_pre(*arrays, **OPTIONS, implementation=harness.implementation)


def seconds(harness: Harness, arrays: tuple, plan: kernel.Plan | None = None) -> float:
    """Device seconds of a boundary; the next repeat takes the streams and the gates of this one."""

    def step(carry: Any, *weights: jax.Array) -> Any:
        streams, out, post, comb = carry
        streams, hidden, post, comb = boundary(harness, (streams, out, post, comb, *weights), plan)
        return streams, hidden, post, comb

    return harness.seconds(step, arrays[:4], *arrays[4:], repeats=4 if arrays[0].shape[0] > 1000 else 20)


def error(results: tuple[jax.Array, ...], arrays: tuple) -> float:
    """The worst of the four results' errors against float64, for the last token."""
    streams, out, post, comb, fn, base, scale = (
        np.asarray(a.astype(jnp.float32), np.float64) for a in (*(a[-1] for a in arrays[:4]), *arrays[4:])
    )
    updated = post[:, None] * out + comb.T @ streams
    seen = np.asarray(jnp.asarray(updated, jnp.float32).astype(jnp.bfloat16).astype(jnp.float32), np.float64)
    flat = seen.reshape(-1)
    z = fn @ (flat / np.sqrt((flat**2).mean() + OPTIONS["norm_eps"]))
    eps = OPTIONS["hc_eps"]
    before = 1 / (1 + np.exp(-(z[:4] * scale[0] + base[:4]))) + eps
    after = 2 / (1 + np.exp(-(z[4:8] * scale[1] + base[4:8])))
    mixed = np.exp((z[8:] * scale[2] + base[8:]).reshape(4, 4))
    mixed = mixed / mixed.sum(1, keepdims=True) + eps
    mixed /= mixed.sum(0) + eps
    for _ in range(OPTIONS["sinkhorn_iterations"] - 1):
        mixed /= mixed.sum(1, keepdims=True) + eps
        mixed /= mixed.sum(0) + eps
    expected = (updated, before @ seen, after, mixed)
    return max(relative_error(r[-1], e) for r, e in zip(results, expected, strict=True))


def measure(harness: Harness) -> list[Row]:
    rows = []
    for tokens, ratio, target in CASES:
        tokens = harness.size(tokens, min(tokens, 5))
        arrays = problem(harness, tokens)
        # Streams in and out, the block's output and the next block's input; fn once.
        moved = arrays[0].nbytes * 2 + arrays[1].nbytes * 2 + arrays[4].nbytes
        least = harness.floor(bytes_moved=moved) * 1e6
        results = harness.call(lambda *a: boundary(harness, a), *arrays)
        rows.append(
            harness.row(
                f"hyper-connection boundary, {tokens} tokens",
                seconds(harness, arrays) * 1e6,
                floor=least,
                target=least * ratio if ratio else target,
                error=error(results, arrays),
            )
        )
    return rows
