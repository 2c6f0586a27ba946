"""float8_e4m3fn in blocks: weights scaled per 128 x 128, activations per token and 128 channels.

Both are values * scale of their block.
"""

import jax
import jax.numpy as jnp

BLOCK = 128
FLOAT8 = jnp.float8_e4m3fn
FLOAT8_MAX = 448.0  # the largest finite float8_e4m3fn
# A product, not a quotient: compilers differ in how they divide by a constant, and one unit in the last place
# of a scale moves values that lie between two float8 numbers.
INVERSE_MAX = 1 / FLOAT8_MAX


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
    check_scales(values, scales, block)
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
    # One reciprocal a group, as in a kernel, where a division an element would cost more than the product.
    values = x.astype(accumulate) * _spread(1 / scales.astype(accumulate), channels, BLOCK)
    # XLA drops a narrowing conversion that is widened at once, and with it the rounding.
    return jax.lax.optimization_barrier((values.astype(FLOAT8), scales))


def dequantize_activations(values: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """values [..., channels] times scales [..., ceil(channels / 128)], in `dtype` (at least float32)."""
    return values.astype(dtype) * _spread(scales.astype(dtype), values.shape[-1], BLOCK)


def round_activations(x: jax.Array) -> jax.Array:
    """x as a float8 kernel sees it: quantised and dequantised again, in at least float32."""
    return dequantize_activations(*quantize_activations(x), jnp.promote_types(x.dtype, jnp.float32))


def check_scales(values: jax.Array, scales: jax.Array, block: int = BLOCK) -> None:
    """Raises ValueError unless scales has one entry for each block of values."""
    *leading, rows, columns = values.shape
    expected = (*leading, -(-rows // block), -(-columns // block))
    if scales.shape != expected:
        raise ValueError(f"values {values.shape} need scales of shape {expected}, got {scales.shape}")


def _scales(largest: jax.Array) -> jax.Array:
    return jnp.where(largest > 0, largest * INVERSE_MAX, 1).astype(jnp.float32)


def _spread(scales: jax.Array, size: int, block: int) -> jax.Array:
    """One scale for a block along the last axis -> one for each of its `size` elements."""
    return jnp.repeat(scales, block, axis=-1)[..., :size]


def _spread_blocks(scales: jax.Array, rows: int, columns: int, block: int) -> jax.Array:
    return jnp.repeat(_spread(scales, columns, block), block, axis=-2)[..., :rows, :]
