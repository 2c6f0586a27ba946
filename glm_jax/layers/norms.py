"""Normalisations, all computed in float32 or wider."""

import jax
import jax.numpy as jnp

from glm_jax.precision import at_least_float32


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis (transformers `Glm5NextTextRMSNorm`).

    `x [..., dim]`, `weight [dim]` -> `[..., dim]` in `x.dtype`. The normalised value is rounded to
    `x.dtype` before the weight is applied, as the reference does.
    """
    wide = at_least_float32(x)
    normalised = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normalised.astype(x.dtype) * weight.astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Mean and variance norm over the last axis with weight and bias; the indexer's keys use it."""
    wide = at_least_float32(x)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normalised = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (normalised * weight + bias).astype(x.dtype)


def l2_normalise(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """`x / sqrt(sum(x^2) + eps)` over the last axis, in `x.dtype`; eps lies inside the root."""
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)
