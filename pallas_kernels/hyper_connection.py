"""Manifold-constrained hyper-connections (mHC): how n residual streams feed a block and take its output.

Before a block the streams are collapsed into one hidden state; after it the block's output is spread over
the streams, which are mixed by a matrix brought close to doubly stochastic by Sinkhorn's iteration. The
gates and the matrix are computed from the streams themselves, in at least float32.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import resolve
from pallas_kernels.hyper_connection_kernel import (
    hyper_connection_post_triton,
    hyper_connection_triton,
    supports,
)

_HIGHEST = jax.lax.Precision.HIGHEST


def hyper_connection_pre(
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iterations: int,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Collapses the streams into a block's input and computes the weights that take its output back.

    streams: [tokens, n, dim]; fn: [n * (2 + n), n * dim], rows in the order pre n, post n, comb n x n
    row-major; base: [n * (2 + n)]; scale: [3], for pre, post and comb. With z = fn . rms_norm(flat streams):
        pre = sigmoid(z_pre * scale[0] + base) + hc_eps;  post = 2 * sigmoid(z_post * scale[1] + base)
        comb = softmax over the last axis of (z_comb * scale[2] + base) + hc_eps, then columns, and
        (sinkhorn_iterations - 1) times rows and columns, are divided by their sum + hc_eps.
    Returns hidden [tokens, dim] = sum_i pre_i * stream_i in streams.dtype, post [tokens, n] and comb
    [tokens, n, n] (source stream, destination stream) in at least float32.
    """
    _check(streams, fn, base, scale, sinkhorn_iterations)
    chosen = resolve(implementation, supported=supports(streams, fn))
    options: dict[str, Any] = {
        "norm_eps": norm_eps,
        "hc_eps": hc_eps,
        "sinkhorn_iterations": sinkhorn_iterations,
    }
    if chosen == "xla":
        return hyper_connection_pre_reference(streams, fn, base, scale, **options)
    interpret = chosen == "interpret"
    return hyper_connection_triton(streams, fn, base, scale, **options, interpret=interpret)[1:]


def hyper_connection_post(
    streams: jax.Array,
    out: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    implementation: str | None = None,
) -> jax.Array:
    """The streams after a block: X'_k = post_k * out + sum_j comb[j, k] * X_j.

    streams: [tokens, n, dim]; out: [tokens, dim]; post: [tokens, n]; comb: [tokens, n, n]. Returns
    [tokens, n, dim] in streams.dtype, accumulated in at least float32 and rounded once.
    """
    chosen = resolve(implementation, supported=supports(streams, streams))
    if chosen == "xla":
        return hyper_connection_post_reference(streams, out, post, comb)
    return hyper_connection_post_triton(streams, out, post, comb, interpret=chosen == "interpret")


def hyper_connection_post_pre(
    streams: jax.Array,
    out: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iterations: int,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`hyper_connection_post` of one block, then `hyper_connection_pre` of the next: one boundary.

    The arguments are theirs. Returns (streams, hidden, post, comb). The kernel projects the updated streams
    while it has them: it reads them once less than the two ops by themselves.
    """
    _check(streams, fn, base, scale, sinkhorn_iterations)
    chosen = resolve(implementation, supported=supports(streams, fn))
    options: dict[str, Any] = {
        "norm_eps": norm_eps,
        "hc_eps": hc_eps,
        "sinkhorn_iterations": sinkhorn_iterations,
    }
    if chosen == "xla":
        streams = hyper_connection_post_reference(streams, out, post, comb)
        return streams, *hyper_connection_pre_reference(streams, fn, base, scale, **options)
    interpret = chosen == "interpret"
    return hyper_connection_triton(
        streams, fn, base, scale, (out, post, comb), **options, interpret=interpret
    )


def hyper_connection_pre_reference(
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iterations: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`hyper_connection_pre` in plain XLA, differentiable."""
    tokens, n, dim = streams.shape
    accumulate = jnp.promote_types(streams.dtype, jnp.float32)
    wide = streams.astype(accumulate)
    flat = wide.reshape(tokens, n * dim)
    flat = flat * jax.lax.rsqrt(jnp.square(flat).mean(axis=-1, keepdims=True) + norm_eps)
    mixes = jnp.dot(flat, fn.astype(accumulate).T, precision=_HIGHEST)
    base, scale = base.astype(accumulate), scale.astype(accumulate)
    pre = jax.nn.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + hc_eps
    post = 2 * jax.nn.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(tokens, n, n)
    comb = sinkhorn(jax.nn.softmax(comb, axis=-1) + hc_eps, hc_eps, sinkhorn_iterations)
    hidden = (pre[..., None] * wide).sum(axis=1).astype(streams.dtype)
    return hidden, post, comb


def sinkhorn(comb: jax.Array, eps: float, iterations: int) -> jax.Array:
    """`iterations` column normalisations of [..., n, n] with a row normalisation between each two.

    One scan with a static length: unrolled, these few divisions are most of a model's compile time.
    """

    def columns(comb: jax.Array) -> jax.Array:
        return comb / (comb.sum(axis=-2, keepdims=True) + eps)

    def step(comb: jax.Array, _: None) -> tuple[jax.Array, None]:
        return columns(comb / (comb.sum(axis=-1, keepdims=True) + eps)), None

    return jax.lax.scan(step, columns(comb), None, length=iterations - 1)[0]


def hyper_connection_post_reference(
    streams: jax.Array, out: jax.Array, post: jax.Array, comb: jax.Array
) -> jax.Array:
    """`hyper_connection_post` in plain XLA, differentiable."""
    accumulate = jnp.promote_types(streams.dtype, jnp.float32)
    mixed = jnp.einsum(
        "tjk,tjd->tkd", comb.astype(accumulate), streams.astype(accumulate), precision=_HIGHEST
    )
    spread = post.astype(accumulate)[..., None] * out.astype(accumulate)[:, None]
    return (spread + mixed).astype(streams.dtype)


def _check(
    streams: jax.Array, fn: jax.Array, base: jax.Array, scale: jax.Array, sinkhorn_iterations: int
) -> None:
    if streams.ndim != 3:
        raise ValueError(f"streams must be [tokens, n, dim], got {streams.shape}")
    _, n, dim = streams.shape
    expected = ((n * (2 + n), n * dim), (n * (2 + n),), (3,))
    if (fn.shape, base.shape, scale.shape) != expected:
        raise ValueError(
            f"streams {streams.shape} need fn, base and scale of shapes {expected}, "
            f"got {fn.shape}, {base.shape}, {scale.shape}"
        )
    if sinkhorn_iterations < 1:
        raise ValueError(f"sinkhorn_iterations must be at least 1, got {sinkhorn_iterations}")
