"""Absorbed attention of prompt tokens over all earlier tokens, or over chosen pools of them, without gathers.

For a prompt chunk this replaces `sparse_mla` where neighbours would gather nearly the same rows: several
tokens with few heads share one walk over their request's latents, and a bit for each pool masks what a
token did not choose. Without bits it is exact dense attention, which selection amounts to up to index_topk
tokens.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import causal_mla_kernel
from pallas_kernels.dispatch import resolve
from pallas_kernels.sparse_mla import sparse_mla_reference


def causal_mla(
    q: jax.Array,
    latents: jax.Array,
    block_tables: jax.Array,
    row_of_token: jax.Array,
    positions: jax.Array,
    *,
    block_size: int,
    scale: float,
    layer: int | jax.Array,
    latent_scales: jax.Array | None = None,
    chosen: jax.Array | None = None,
    kpool: int = 1,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of every token over its request's tokens up to itself, or the chosen ones among them.

    q: [tokens, heads, dim], absorbed; latents: [layers, rows, dim] and latent_scales as in `sparse_mla`;
    block_tables: [requests, width] int32, -1 where unused; row_of_token: [tokens] int32, -1 for padding;
    positions: [tokens] int32 absolute. chosen: [tokens, words] int32 from `pool_bits`, the pools of kpool
    tokens a token attends to besides its tail, or None for all tokens. Returns [tokens, heads, dim] in
    q.dtype, zeros for padding.
    """
    supported = causal_mla_kernel.supported(q, latents, kpool, chosen is not None)
    picked = resolve(implementation, supported=supported)
    if picked == "xla":
        rows = visible_rows(block_tables, row_of_token, positions, block_size, chosen, kpool)
        return sparse_mla_reference(q, latents, rows, scale, layer, latent_scales)
    return causal_mla_kernel.causal_mla(
        q,
        latents,
        block_tables,
        row_of_token,
        positions,
        block_size=block_size,
        scale=scale,
        layer=layer,
        latent_scales=latent_scales,
        chosen=chosen,
        kpool=kpool,
        interpret=picked == "interpret",
    )


def pool_bits(ids: jax.Array, pools: int) -> jax.Array:
    """Pool ids [tokens, k] int32 (-1 for none, none twice) as bits: [tokens, ceil(pools / 32)] int32."""
    token = jnp.arange(ids.shape[0])[:, None]
    words = -(-pools // 32)
    word = jnp.where(ids >= 0, ids // 32, words)
    bit = jnp.left_shift(jnp.int32(1), jnp.maximum(ids, 0) % 32)
    return jnp.zeros((ids.shape[0], words), jnp.int32).at[token, word].add(bit, mode="drop")


def visible_rows(
    block_tables: jax.Array,
    row_of_token: jax.Array,
    positions: jax.Array,
    block_size: int,
    chosen: jax.Array | None,
    kpool: int,
) -> jax.Array:
    """[tokens, width * block_size] int32: the cache row of every position a token attends to, else -1."""
    position = jnp.arange(block_tables.shape[1] * block_size, dtype=jnp.int32)
    blocks = block_tables[jnp.maximum(row_of_token, 0)][:, position // block_size]
    visible = (position <= positions[:, None]) & (row_of_token >= 0)[:, None]
    if chosen is not None:
        pool = position // kpool
        words = jnp.take(chosen, pool // 32, axis=1, mode="fill", fill_value=0)
        tail = position >= (positions[:, None] + 1) // kpool * kpool
        visible &= (jnp.right_shift(words, pool % 32) & 1 == 1) | tail
    return jnp.where(visible & (blocks >= 0), blocks * block_size + position % block_size, -1)
