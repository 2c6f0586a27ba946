"""Kimi Delta Attention: projections before, gated norm and projection after the recurrence (MODEL.md M.3)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm_jax.collectives import all_reduce
from glm_jax.config import Config
from glm_jax.layers.norms import l2_normalise
from glm_jax.params import Kda
from glm_jax.precision import at_least_float32
from glm_jax.quantization import BlockScaled, Weight, matmul


class KdaInputs(NamedTuple):
    """What the sequence operation needs, per token."""

    qkv: jax.Array  # [tokens, 3 * heads * dim] raw inputs of the short convolution, order q, k, v
    log_decay: jax.Array  # [tokens, heads, dim] at least float32, <= 0
    beta: jax.Array  # [tokens, heads] at least float32, in (0, 1)
    output_gate: jax.Array  # [tokens, heads, dim] compute dtype, before its sigmoid


def _flat_weight(stacked: Weight) -> jax.Array:
    """`[parts, out, in]` -> `[parts * out, in]`: several projections of one input as one matmul."""
    if isinstance(stacked, BlockScaled):
        raise TypeError("stacked KDA projections are never block-scaled: loading dequantises them")
    return stacked.reshape(-1, stacked.shape[-1])


def kda_inputs(p: Kda, config: Config, x: jax.Array) -> KdaInputs:
    """Projects hidden states `[tokens, hidden]` to the recurrence's inputs."""
    heads, dim = p.A_log.shape[0], p.o_norm.shape[0]
    forget, output = jnp.split(matmul(x, _flat_weight(p.fg_a)), 2, axis=-1)
    forget = at_least_float32(matmul(forget, p.f_b)) + p.dt_bias
    log_decay = forget_gate(forget.reshape(-1, heads, dim), p.A_log, config.gate_lower_bound)
    return KdaInputs(
        qkv=matmul(x, _flat_weight(p.qkv_proj)),
        log_decay=log_decay,
        beta=jax.nn.sigmoid(at_least_float32(matmul(x, p.b_proj))),
        output_gate=matmul(output, p.g_b).reshape(-1, heads, dim),
    )


def forget_gate(x: jax.Array, A_log: jax.Array, lower_bound: float | None) -> jax.Array:
    """Log decay from the biased gate input `[tokens, heads, dim]` and `A_log [heads]`.

    With a bound (released checkpoint: -5) the bound is a multiplicative scale of a sigmoid, which keeps
    every decay strictly inside it; without one the decay is an unbounded softplus.
    """
    rate = jnp.exp(A_log.astype(x.dtype))[:, None]
    if lower_bound is not None:
        return lower_bound * jax.nn.sigmoid(rate * x)
    return -rate * jax.nn.softplus(x)


def split_qkv(convolved: jax.Array, heads: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Convolved and activated `[..., 3 * heads * dim]` -> q (normalised and scaled), k (normalised), v.

    Each `[..., heads, dim]`; q and k at least float32 (the l2 norms are taken after the widening), v as it
    came: kernels choose their matrix units by it.
    """
    parts = jnp.split(convolved, 3, axis=-1)
    q, k, v = (part.reshape(*part.shape[:-1], heads, -1) for part in parts)
    q, k = at_least_float32(q), at_least_float32(k)
    return l2_normalise(q) * q.shape[-1] ** -0.5, l2_normalise(k), v


def kda_output(
    p: Kda, config: Config, recurrent: jax.Array, output_gate: jax.Array, axis: str | None
) -> jax.Array:
    """Gated RMS norm per head (sigmoid gate, float32 throughout, one cast) and the output projection.

    `recurrent [tokens, heads, dim]` is first rounded to the compute dtype, as the reference's kernels do.
    """
    dtype = output_gate.dtype
    wide = at_least_float32(recurrent.astype(dtype))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.rms_norm_eps)
    gated = wide * p.o_norm.astype(wide.dtype) * jax.nn.sigmoid(at_least_float32(output_gate))
    gated = gated.astype(dtype).reshape(gated.shape[0], -1)
    return all_reduce(matmul(gated, p.o_proj), axis)
