"""Causal and pool-masked MLA as a Pallas-Triton kernel: neighbouring tokens share one walk over the latents.

The query heads of several tokens stand side by side as up to 64 rows of one product. A program walks its
tokens' request block by block, up to its last token; tokens of different requests in one tile take turns.
The longest walks start first.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import sparse_mla_kernel, triton
from pallas_kernels.sparse_mla_kernel import LOG2_E

_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Query rows (tokens x heads) and keys of a program's tile, launch parameters, whether for ROCm."""

    rows: int
    keys: int
    launch: triton.Launch
    rocm: bool = False


CUDA = Tiles(_ROWS, 64, triton.Launch(num_warps=8, num_stages=2))
# 64 float8 keys widened need 233 KiB of shared memory as XLA's Triton compiles them; an H200 has 227.
CUDA_WIDE = Tiles(_ROWS, 16, triton.Launch(num_warps=8, num_stages=2))  # rows above 1 KiB: float32
CUDA_FLOAT8 = Tiles(_ROWS, 32, triton.Launch(num_warps=8, num_stages=4))
ROCM = Tiles(_ROWS, 16, triton.Launch(num_warps=4, num_stages=1), rocm=True)


def supported(q: jax.Array, latents: jax.Array, kpool: int, masked: bool) -> bool:
    """Heads a power of two up to 64; with `masked`, kpool a power of two of at least 2: the keys of the
    largest tile then lie within one word of bits."""
    heads = q.shape[1]
    fits = not masked or (kpool & (kpool - 1) == 0 and 32 * kpool >= CUDA.keys)
    return heads & (heads - 1) == 0 and heads <= _ROWS and fits and sparse_mla_kernel.supported(q, latents)


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
    latent_scales: jax.Array | None,
    chosen: jax.Array | None,
    kpool: int,
    interpret: bool = False,
    tiles: Tiles | None = None,
) -> jax.Array:
    """The kernel behind `pallas_kernels.causal_mla.causal_mla`, which gives the shapes."""
    arrays: tuple[jax.Array, ...] = (
        jnp.asarray(layer, jnp.int32).reshape(1),
        q,
        row_of_token,
        positions,
        block_tables,
        latents,
    )
    arrays += () if latent_scales is None else (latent_scales,)
    arrays += () if chosen is None else (chosen,)
    run = functools.partial(
        _run,
        scaled=latent_scales is not None,
        masked=chosen is not None,
        block_size=block_size,
        scale=scale,
        kpool=kpool,
        interpret=interpret,
    )
    wide = sparse_mla_kernel.wide_rows(q)
    cuda = CUDA_FLOAT8 if latent_scales is not None else CUDA_WIDE if wide else CUDA
    if tiles is not None or interpret:
        return run(tiles or cuda, *arrays)
    return triton.per_platform(run, *arrays, cuda=cuda, rocm=ROCM)


def _run(
    tiles: Tiles,
    layer: jax.Array,
    q: jax.Array,
    *arrays: jax.Array,
    scaled: bool,
    masked: bool,
    block_size: int,
    scale: float,
    kpool: int,
    interpret: bool,
) -> jax.Array:
    tokens, heads, dim = q.shape
    programs = -(-tokens * heads // tiles.rows)
    kernel = functools.partial(
        _attend,
        tokens=tokens,
        heads=heads,
        rows=tiles.rows,
        keys=tiles.keys,
        programs=programs,
        block_size=block_size,
        scale=scale * LOG2_E,
        kpool=kpool,
        scaled=scaled,
        masked=masked,
        rocm=tiles.rocm,
    )
    out = triton.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((programs * tiles.rows, dim), q.dtype),
        grid=(programs,),
        cuda=tiles.launch,
        rocm=tiles.launch,
        interpret=interpret,
        name="causal_mla",
    )(layer, q.reshape(tokens * heads, dim), *arrays)
    return out[: tokens * heads].reshape(q.shape)


def _quotient(x: jax.Array, n: int) -> jax.Array:
    """x // n of numbers that are not negative, which spares the rounding of `//`."""
    return lax.div(x, jnp.asarray(n, x.dtype))


def _remainder(x: jax.Array, n: int) -> jax.Array:
    return lax.rem(x, jnp.asarray(n, x.dtype))


def _attend(
    layer_ref: Any,
    q_ref: Any,
    row_ref: Any,
    position_ref: Any,
    tables_ref: Any,
    latents_ref: Any,
    *refs: Any,
    tokens: int,
    heads: int,
    rows: int,
    keys: int,
    programs: int,
    block_size: int,
    scale: float,
    kpool: int,
    scaled: bool,
    masked: bool,
    rocm: bool,
) -> None:
    scales_ref = refs[0] if scaled else None
    chosen_ref = refs[-2] if masked else None
    dim = q_ref.shape[1]
    layer = layer_ref[0]
    query = (programs - 1 - triton.program_id(0)) * rows + jnp.arange(rows, dtype=jnp.int32)
    token = _quotient(query, heads)
    real = token < tokens
    row = triton.load(row_ref.at[token], mask=real, other=-1)
    position = triton.load(position_ref.at[token], mask=real, other=-1)
    column = jnp.arange(dim)
    q = triton.load(q_ref.at[jnp.where(real, query, 0)[:, None], column[None, :]])
    load_tile = sparse_mla_kernel.tile_loader(latents_ref, scales_ref, layer, dim, rocm)

    def attend_request(number: jax.Array, carry: tuple) -> tuple:
        of_row = row == number
        last = jnp.where(of_row, position, -1).max()

        def cache_rows(tile: int | jax.Array) -> jax.Array:
            # Past the last token, the last token's row stands in: its weight is zero, and it holds numbers.
            at = jnp.clip(tile * keys + jnp.arange(keys, dtype=jnp.int32), 0, jnp.maximum(last, 0))
            block = triton.load(tables_ref.at[number, _quotient(at, block_size)])
            return block * block_size + _remainder(at, block_size)

        def body(tile: jax.Array, carry: tuple) -> tuple:
            sums, cached = carry
            ahead = cache_rows(tile + 1)
            at = tile * keys + jnp.arange(keys, dtype=jnp.int32)
            visible = of_row[:, None] & (at[None, :] <= position[:, None])
            if chosen_ref is not None:
                pool = _quotient(at, kpool)
                word = triton.load(
                    chosen_ref.at[token, _quotient(tile * keys, 32 * kpool)], mask=real & (row >= 0), other=0
                )
                bit = jnp.right_shift(word[:, None], _remainder(pool, 32)[None, :]) & 1
                tail = at[None, :] >= (_quotient(position + 1, kpool) * kpool)[:, None]
                visible &= (bit == 1) | tail
            latents = load_tile(cached)
            some = None if rocm else tile * keys <= last
            return sparse_mla_kernel.attend_tile(q, latents, visible, scale, some, *sums), ahead

        return lax.fori_loop(jnp.int32(0), _quotient(last + keys, keys), body, (carry, cache_rows(0)))[0]

    first = jnp.where(row >= 0, row, 2**30).min()
    start = sparse_mla_kernel.empty_sums(rows, dim)
    _, total, acc = lax.fori_loop(first, row.max() + 1, attend_request, start)
    some = total > 0
    out = jnp.where(some[:, None], acc / jnp.where(some, total, 1)[:, None], 0)
    triton.store(refs[-1].at[query[:, None], column[None, :]], out.astype(refs[-1].dtype))
