"""Absorbed multi-head latent attention over chosen rows of a stacked latent cache.

After absorption every head attends over the same latents, which serve as keys and as values:
    score[t, h, s] = scale * q[t, h] . c[indices[t, s]]
    out[t, h] = sum_s softmax(score[t, h])[s] * c[indices[t, s]]

Latents are cached in the compute dtype or as float8_e4m3fn with one scale for 128 channels. The scales are
powers of two, so that a dequantised latent is exact in bfloat16 and every path (kernel, reference, any
chunking) sees one value.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import sparse_mla_kernel
from pallas_kernels.dispatch import resolve

SCALE_CHANNELS = 128
FLOAT8 = jnp.float8_e4m3fn
_GATHER_BYTES = 64 * 2**20
_SMALLEST_EXPONENT = -100  # 2**-100 and its reciprocal are normal float32 numbers


def sparse_mla(
    q: jax.Array,
    latents: jax.Array,
    indices: jax.Array,
    *,
    scale: float,
    layer: int | jax.Array,
    latent_scales: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of every query over its own list of latent rows.

    q: [tokens, heads, dim], already absorbed. latents: [layers, rows, dim] in the compute dtype, or
    float8_e4m3fn with latent_scales [layers, rows, dim / 128]. indices: [tokens, width] int32 rows of the
    cache, -1 for none. layer: which of the stacked layers, traced or not. Returns [tokens, heads, dim] in
    q.dtype; the softmax is at least float32; a query without a valid index gets zeros. Rows that no valid
    index names are never used, whatever they hold.
    """
    _check(q, latents, indices, latent_scales)
    chosen = resolve(implementation, supported=sparse_mla_kernel.supported(q, latents))
    if chosen == "xla":
        return sparse_mla_reference(q, latents, indices, scale, layer, latent_scales)
    return sparse_mla_kernel.sparse_mla(
        q, latents, indices, scale, layer, latent_scales, interpret=chosen == "interpret"
    )


def sparse_mla_reference(
    q: jax.Array,
    latents: jax.Array,
    indices: jax.Array,
    scale: float,
    layer: int | jax.Array,
    latent_scales: jax.Array | None = None,
) -> jax.Array:
    """`sparse_mla` in plain XLA, over tiles of queries so that the gathered latents stay within 64 MiB."""
    tokens, _, dim = q.shape
    width = indices.shape[1]
    accumulate = jnp.promote_types(q.dtype, jnp.float32)
    query_bytes = max(1, width * dim * jnp.dtype(accumulate).itemsize)
    tile = max(1, min(tokens, _GATHER_BYTES // query_bytes))

    @jax.checkpoint
    def attend(tile_inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, rows = tile_inputs
        gathered = gather_latents(latents, layer, rows, accumulate, latent_scales)
        return _attend(queries, gathered, rows >= 0, scale)

    if tile >= tokens:
        return attend((q, indices))
    tiles = -(-tokens // tile)
    padding = tiles * tile - tokens
    q_tiles = jnp.pad(q, ((0, padding), (0, 0), (0, 0))).reshape(tiles, tile, *q.shape[1:])
    index_tiles = jnp.pad(indices, ((0, padding), (0, 0)), constant_values=-1).reshape(tiles, tile, width)
    out = jax.lax.map(attend, (q_tiles, index_tiles))
    return out.reshape(tiles * tile, *q.shape[1:])[:tokens]


def _attend(q: jax.Array, latents: jax.Array, valid: jax.Array, scale: float) -> jax.Array:
    """q [tokens, heads, dim], latents [tokens, width, dim] (zero where invalid), valid [tokens, width]."""
    accumulate = latents.dtype
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("thd,tsd->ths", q.astype(accumulate), latents, precision=highest) * scale
    scores = jnp.where(valid[:, None], scores, -jnp.inf)
    largest = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(scores - jnp.where(largest == -jnp.inf, 0, largest))
    total = weights.sum(axis=-1, keepdims=True)
    out = jnp.einsum("ths,tsd->thd", weights, latents, precision=highest)
    return (out / jnp.where(total == 0, 1, total)).astype(q.dtype)


def gather_latents(
    latents: jax.Array,
    layer: int | jax.Array,
    rows: jax.Array,
    dtype: jnp.dtype,
    latent_scales: jax.Array | None = None,
) -> jax.Array:
    """Rows of one layer, dequantised: [..., dim] in `dtype`; zeros for row -1, NaN past the cache's end."""
    valid = rows >= 0
    safe = jnp.where(valid, rows, 0)
    gathered = latents.at[layer, safe].get(mode="fill", fill_value=jnp.nan).astype(dtype)
    if latent_scales is not None:
        scales = latent_scales.at[layer, safe].get(mode="fill", fill_value=jnp.nan)
        gathered = gathered * jnp.repeat(scales.astype(dtype), SCALE_CHANNELS, axis=-1)
    return jnp.where(valid[..., None], gathered, 0)


def quantize_latents(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float8_e4m3fn values and one power-of-two scale for 128 channels.

    values: [..., dim], dim a multiple of 128. Returns ([..., dim] float8_e4m3fn, [..., dim / 128] at least
    float32). The scale is the smallest power of two that brings the group's largest magnitude within 448,
    e4m3's largest finite value; e4m3 is a floating format, so a finer scale would not make it more precise.
    Found from the exponent bits, without a logarithm: every platform finds the same one.
    """
    dim = values.shape[-1]
    if dim % SCALE_CHANNELS:
        raise ValueError(f"latents of {dim} channels cannot be quantised in groups of {SCALE_CHANNELS}")
    accumulate = jnp.promote_types(values.dtype, jnp.float32)
    grouped = values.astype(accumulate).reshape(*values.shape[:-1], dim // SCALE_CHANNELS, SCALE_CHANNELS)
    largest = jnp.abs(grouped).max(axis=-1)
    fraction, exponent = jnp.frexp(largest)  # largest = fraction * 2**exponent; 448 = 0.875 * 2**9
    exponent = jnp.maximum(exponent - 9 + (fraction > 0.875), _SMALLEST_EXPONENT)
    scales = jnp.where(largest > 0, jnp.ldexp(jnp.ones_like(largest), exponent), 1)
    quantized = (grouped / scales[..., None]).astype(FLOAT8)
    return quantized.reshape(values.shape), scales


def dequantize_latents(values: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """values [..., dim] float8_e4m3fn times scales [..., dim / 128], in `dtype` (exact from bfloat16 up)."""
    accumulate = jnp.promote_types(dtype, jnp.float32)
    spread = jnp.repeat(scales.astype(accumulate), SCALE_CHANNELS, axis=-1)
    return (values.astype(accumulate) * spread).astype(dtype)


def write_latents(
    latents: jax.Array,
    layer: int | jax.Array,
    rows: jax.Array,
    values: jax.Array,
    latent_scales: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Stores new latents in one layer of the cache.

    latents: [layers, rows, dim]; rows: [tokens] int32, -1 (or past the end) dropped; values: [tokens, dim].
    With latent_scales [layers, rows, dim / 128] the values are quantised. Returns the latents, or (latents,
    scales).
    """
    target = jnp.where(rows >= 0, rows, latents.shape[1])
    if latent_scales is None:
        return latents.at[layer, target].set(values.astype(latents.dtype), mode="drop")
    quantized, scales = quantize_latents(values)
    return (
        latents.at[layer, target].set(quantized, mode="drop"),
        latent_scales.at[layer, target].set(scales.astype(latent_scales.dtype), mode="drop"),
    )


def _check(q: jax.Array, latents: jax.Array, indices: jax.Array, latent_scales: jax.Array | None) -> None:
    if q.ndim != 3 or latents.ndim != 3 or indices.ndim != 2:
        raise ValueError(
            "sparse_mla takes q [tokens, heads, dim], latents [layers, rows, dim], indices [tokens, width]; "
            f"got {q.shape}, {latents.shape}, {indices.shape}"
        )
    if q.shape[2] != latents.shape[2] or q.shape[0] != indices.shape[0]:
        raise ValueError(f"q {q.shape} does not fit latents {latents.shape} and indices {indices.shape}")
    if (latents.dtype == FLOAT8) != (latent_scales is not None):
        given = None if latent_scales is None else latent_scales.shape
        raise ValueError(
            f"float8_e4m3fn latents come with latent_scales, others without: {latents.dtype}, {given}"
        )
