"""Scores of pools for a ragged batch as a Pallas-Triton kernel, and their selection.

One program holds a few neighbouring tokens' query heads side by side as the columns of a product and walks
over its share of their row's pooled keys, block by block through the block table: a key tile is read once
for all of the heads. Tokens of different rows in one tile take turns. The walk ends at the last pool that
any of the tokens may see, so the work follows the context and not the table's width; tokens that may see at
most k pools are not scored at all.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import select_kernel, triton

SCORE_BYTES = 2**30  # the largest buffer of scores


@dataclasses.dataclass(frozen=True)
class Tiles:
    """tokens and pools of a program's tile, programs that share a tile of tokens, launch parameters."""

    tokens: int
    pools: int
    shares: int
    launch: triton.Launch


def supported(q: jax.Array, pooled: jax.Array, k: int) -> bool:
    """Heads and channels must be powers of two, as every shape in a Triton program."""
    _, heads, dim = q.shape
    powers = all(size & (size - 1) == 0 for size in (heads, dim))
    dtypes = q.dtype == pooled.dtype and q.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
    return powers and heads * 8 >= 16 and dim >= 16 and dtypes and select_kernel.supported(k)


def choose_tiles(tokens: int, heads: int, pools: int, rows: int) -> Tiles:
    """Few tokens a row (decode): a narrow tile and many shares; else as many tokens as fill 128 columns.

    8192 queries x 2048 pools x 32 heads with selection on an H200: 294 us so, 309 with 256 columns, 8 warps.
    """
    decode = tokens <= 8 * rows
    tile = max(1, (64 if decode else 128) // heads)
    width = 64
    programs = -(-tokens // tile)
    shares = max(1, min(512 // max(1, programs), -(-pools // width)))
    return Tiles(tile, width, shares, triton.Launch(num_warps=4, num_stages=2))


def select_paged(
    q: jax.Array,
    head_weights: jax.Array,
    pooled: jax.Array,
    layer: int | jax.Array,
    block_tables: jax.Array,
    row_of_token: jax.Array,
    counts: jax.Array,
    k: int,
    *,
    interpret: bool = False,
    tiles: Tiles | None = None,
) -> jax.Array:
    """The kernels behind `pallas_kernels.pool_index.select_paged`, which gives the shapes."""
    tokens, heads, _ = q.shape
    pools = block_tables.shape[1] * pooled.shape[2]
    tiles = tiles or choose_tiles(tokens, heads, pools, block_tables.shape[0])
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    counts = jnp.where(row_of_token >= 0, counts, 0)
    row_bytes = 4 * max(1, -(-pools // tiles.pools)) * tiles.pools
    most = max(1, SCORE_BYTES // row_bytes // tiles.tokens) * tiles.tokens

    def select(inputs: tuple[jax.Array, ...]) -> jax.Array:
        queries, weights, rows, visible = inputs
        scores = _scores(queries, weights, pooled, layer, block_tables, rows, visible, k, tiles, interpret)
        return select_kernel.select(scores, visible, k, interpret=interpret)

    inputs = (q, head_weights, row_of_token, counts)
    if tokens <= most:
        return select(inputs)
    pieces = -(-tokens // most)
    padding = pieces * most - tokens
    padded = (
        jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1), constant_values=-1 if x is row_of_token else 0)
        for x in inputs
    )
    cut = tuple(x.reshape(pieces, most, *x.shape[1:]) for x in padded)
    return jax.lax.map(select, cut).reshape(pieces * most, k)[:tokens]


def _scores(
    q: jax.Array,
    head_weights: jax.Array,
    pooled: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    row_of_token: jax.Array,
    counts: jax.Array,
    k: int,
    tiles: Tiles,
    interpret: bool,
) -> jax.Array:
    """[tokens, pools] float32, each rounded up to whole tiles.

    Written for the first `counts` pools of the tokens with counts > k, and only there.
    """
    tokens, heads, dim = q.shape
    pools = block_tables.shape[1] * pooled.shape[2]
    token_tiles, pool_tiles = -(-tokens // tiles.tokens), -(-pools // tiles.pools)
    kernel = functools.partial(
        _score,
        tokens=tokens,
        heads=heads,
        tile_tokens=tiles.tokens,
        tile_pools=tiles.pools,
        shares=tiles.shares,
        pools_per_block=pooled.shape[2],
        table_width=block_tables.shape[1],
        k=k,
    )
    return triton.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((token_tiles * tiles.tokens, pool_tiles * tiles.pools), jnp.float32),
        grid=(token_tiles, tiles.shares),
        cuda=tiles.launch,
        rocm=dataclasses.replace(tiles.launch, num_warps=4, num_stages=1),
        interpret=interpret,
        name="score_pools",
    )(
        layer,
        q.reshape(tokens * heads, dim),
        (head_weights.astype(jnp.float32) * dim**-0.5).reshape(tokens * heads),
        row_of_token,
        counts,
        block_tables,
        pooled,
    )


def _score(
    layer_ref: Any,
    q_ref: Any,
    weights_ref: Any,
    row_ref: Any,
    counts_ref: Any,
    tables_ref: Any,
    pooled_ref: Any,
    out_ref: Any,
    *,
    tokens: int,
    heads: int,
    tile_tokens: int,
    tile_pools: int,
    shares: int,
    pools_per_block: int,
    table_width: int,
    k: int,
) -> None:
    layer = layer_ref[0]
    dim = q_ref.shape[1]
    share = triton.program_id(1)
    token = triton.program_id(0) * tile_tokens + jnp.arange(tile_tokens)
    row = triton.load(row_ref.at[token], mask=token < tokens, other=-1)
    count = triton.load(counts_ref.at[token], mask=token < tokens, other=0)
    count = jnp.where((row >= 0) & (count > k), count, 0)

    columns = tile_tokens * heads
    query = triton.program_id(0) * columns + jnp.arange(columns)
    channel = jnp.arange(dim)
    in_range = query < tokens * heads
    q = triton.load(q_ref.at[jnp.where(in_range, query, 0)[:, None], channel[None, :]])
    weights = triton.load(weights_ref.at[query], mask=in_range, other=0.0)

    def score_row(number: jax.Array, carry: jax.Array) -> jax.Array:
        of_row = row == number
        last = jnp.where(of_row, count, 0).max()
        tiles = (last + tile_pools - 1) // tile_pools

        def score_tile(step: jax.Array, carry: jax.Array) -> jax.Array:
            pool = (share + step * shares) * tile_pools + jnp.arange(tile_pools)
            column = jnp.minimum(pool // pools_per_block, table_width - 1)
            block = jnp.maximum(triton.load(tables_ref.at[number, column]), 0)
            place = pool % pools_per_block
            keys = triton.load(pooled_ref.at[layer, block[:, None], place[:, None], channel[None, :]])
            active = jnp.maximum(triton.dot(keys, q, trans_b=True), 0) * weights[None, :]
            scores = active.reshape(tile_pools, tile_tokens, heads).sum(axis=2)
            mask = of_row[None, :] & (pool[:, None] < count[None, :])
            triton.store(out_ref.at[token[None, :], pool[:, None]], scores, mask=mask)
            return carry

        return jax.lax.fori_loop(0, jnp.maximum(tiles - share + shares - 1, 0) // shares, score_tile, carry)

    wanted = count > 0
    first = jnp.where(wanted, row, 2**30).min()
    last = jnp.where(wanted, row, -1).max()
    jax.lax.fori_loop(first, last + 1, score_row, jnp.int32(0))
