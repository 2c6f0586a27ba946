"""float8_e4m3fn weights with one float32 scale for a block of 128 x 128, and activations quantised alike.

A weight is values * scale of its block. Activations may be quantised per token and 128 channels, as the
released checkpoint's `activation_scheme: dynamic` asks; the reference emulates it, so that a kernel is
always compared with like.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import resolve

BLOCK = 128
FLOAT8 = jnp.float8_e4m3fn
FLOAT8_MAX = 448.0  # the largest finite float8_e4m3fn


def quantize_blocks(w: jax.Array, block: int = BLOCK) -> tuple[jax.Array, jax.Array]:
    """Quantises the last two axes in blocks.

    w: [..., out, in]. Returns (values [..., out, in] float8_e4m3fn, scales [..., ceil(out / block),
    ceil(in / block)] float32); a block of zeros has scale 1.
    """
    *leading, rows, columns = w.shape
    accumulate = jnp.promote_types(w.dtype, jnp.float32)
    block_rows, block_columns = -(-rows // block), -(-columns // block)
    padding = [(0, 0)] * len(leading) + [(0, block_rows * block - rows), (0, block_columns * block - columns)]
    tiled = jnp.pad(w.astype(accumulate), padding).reshape(*leading, block_rows, block, block_columns, block)
    scales = _scales(jnp.abs(tiled).max(axis=(-3, -1)))
    values = w.astype(accumulate) / _spread_blocks(scales.astype(accumulate), rows, columns, block)
    return values.astype(FLOAT8), scales


def dequantize_blocks(
    values: jax.Array, scales: jax.Array, dtype: jnp.dtype, block: int = BLOCK
) -> jax.Array:
    """values [..., out, in] times the scale of their block, multiplied in at least float32, as `dtype`."""
    accumulate = jnp.promote_types(dtype, jnp.float32)
    rows, columns = values.shape[-2:]
    _check_scales(values, scales, block)
    spread = _spread_blocks(scales.astype(accumulate), rows, columns, block)
    return (values.astype(accumulate) * spread).astype(dtype)


def quantize_activations(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantises every token in groups of 128 channels.

    x: [..., channels]. Returns (values [..., channels] float8_e4m3fn, scales [..., ceil(channels / 128)]
    float32); a group of zeros has scale 1.
    """
    channels = x.shape[-1]
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    groups = -(-channels // BLOCK)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, groups * BLOCK - channels)]
    grouped = jnp.pad(x.astype(accumulate), padding).reshape(*x.shape[:-1], groups, BLOCK)
    scales = _scales(jnp.abs(grouped).max(axis=-1))
    values = x.astype(accumulate) / _spread(scales.astype(accumulate), channels, BLOCK)
    return values.astype(FLOAT8), scales


def dequantize_activations(values: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """values [..., channels] times scales [..., ceil(channels / 128)], in `dtype` (at least float32)."""
    return values.astype(dtype) * _spread(scales.astype(dtype), values.shape[-1], BLOCK)


def block_scaled_matmul(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    *,
    quantize_activations: bool,
    implementation: str | None = None,
) -> jax.Array:
    """x @ W^T for a weight W = values * scales, accumulated in at least float32.

    x: [..., in]; values: [out, in] float8_e4m3fn; scales: [ceil(out / 128), ceil(in / 128)] float32.
    quantize_activations: round x to float8 per token and 128 channels first. Returns [..., out] in x.dtype.
    """
    _check_scales(values, scales, BLOCK)
    if x.shape[-1] != values.shape[-1]:
        raise ValueError(f"x of {x.shape[-1]} channels does not fit a weight of {values.shape[-1]} inputs")
    resolve(implementation)
    return block_scaled_matmul_reference(x, values, scales, quantize_activations=quantize_activations)


def block_scaled_matmul_reference(
    x: jax.Array, values: jax.Array, scales: jax.Array, *, quantize_activations: bool
) -> jax.Array:
    """`block_scaled_matmul` in plain XLA. In float32 the same bits as a plain weight of the same values."""
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    wide = round_activations(x) if quantize_activations else x.astype(accumulate)
    w = dequantize_blocks(values, scales, accumulate)
    return jnp.matmul(wide, w.T, precision=jax.lax.Precision.HIGHEST).astype(x.dtype)


def round_activations(x: jax.Array) -> jax.Array:
    """x as a float8 kernel sees it: quantised and dequantised again, in at least float32."""
    return dequantize_activations(*quantize_activations(x), jnp.promote_types(x.dtype, jnp.float32))


def _scales(largest: jax.Array) -> jax.Array:
    return jnp.where(largest > 0, largest / FLOAT8_MAX, 1).astype(jnp.float32)


def _spread(scales: jax.Array, size: int, block: int) -> jax.Array:
    """One scale for a block along the last axis -> one for each of its `size` elements."""
    return jnp.repeat(scales, block, axis=-1)[..., :size]


def _spread_blocks(scales: jax.Array, rows: int, columns: int, block: int) -> jax.Array:
    return jnp.repeat(_spread(scales, columns, block), block, axis=-2)[..., :rows, :]


def _check_scales(values: jax.Array, scales: jax.Array, block: int) -> None:
    *leading, rows, columns = values.shape
    expected = (*leading, -(-rows // block), -(-columns // block))
    if scales.shape != expected:
        raise ValueError(f"values {values.shape} need scales of shape {expected}, got {scales.shape}")
