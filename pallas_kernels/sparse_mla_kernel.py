"""Sparse MLA as Pallas-Triton kernels: attention over gathered latents, in splits of the keys, and their sum.

One program holds one block of heads of one query and runs over one split of its keys. A tile of latents is
gathered once and serves as keys and as values. The gather of a tile depends on row numbers that were read
one tile earlier (`rows_ahead`): so it is no load through a load, and the compiler can keep several tiles
in flight. Rows that are not there are gathered as zeros: their weight is zero, but zero times what lies in an
unused row need not be zero.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import triton

_LOWEST = -1e30  # a finite first maximum: exp2(_LOWEST - _LOWEST) is 1, where -inf would give NaN
LOG2_E = math.log2(math.e)
GROUP = 128  # channels that share a scale
_LAUNCH = triton.Launch()


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a problem is cut up: heads and keys of a program's tile, splits of the keys, launch parameters.

    rocm: compile for AMD, which changes how float8 is widened (`tile_loader`) and needs no condition around
    the weights (`attend_tile`).
    """

    heads: int
    keys: int
    splits: int = 1
    launch: triton.Launch = _LAUNCH
    rocm: bool = False


def supported(q: jax.Array, latents: jax.Array) -> bool:
    """Shapes and dtypes the kernels take."""
    dim = q.shape[2]
    power_of_two = dim & (dim - 1) == 0
    fits = dim * q.dtype.itemsize <= 2048  # of a row in shared memory, beside the queries
    return power_of_two and dim >= GROUP and fits and q.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)


def wide_rows(q: jax.Array) -> bool:
    """Whether a row of latents, as the kernel holds it, exceeds the 1 KiB that the tiles are cut for."""
    return q.shape[2] * q.dtype.itemsize > 1024


def choose_tiles(
    tokens: int, heads: int, width: int, *, rocm: bool, float8: bool = False, wide: bool = False
) -> Tiles:
    """Tiles for a problem; with few queries, the number of splits that ends soonest.

    AMD: 64 heads x 16 keys is the largest tile without spills on gfx942 with either kind of latents, and
    its scratch is that chip's 64 KiB; with fewer heads, float8 latents keep to 16 keys. NVIDIA, measured on
    an H200: 64 heads, one warp group's rows, do best with 64 keys of 1 KiB, twice, which fill the shared
    memory beside the queries (2048 queries 1.85 ms, 32 keys 2.30; 32 queries in 4 splits 51 us, 32 keys 65).
    Float8 latents of 64 keys do not fit it (32 keys in four stages 3.55 ms). 8 heads: 8192 queries take 4.57
    ms with 32 keys and 4 warps, 5.43 with 64 and 8. One query of 64 heads: 18 us with 32 or 64 a program.
    `wide`: rows of latents take up to 2 KiB (float32); then tiles are small enough to fit, unmeasured.
    """
    sizes = (32, 16) if not rocm and (tokens <= 2 or wide) else (64, 32, 16)
    block = heads if heads < 16 else next(size for size in sizes if heads % size == 0 or size == 16)
    many = tokens * -(-heads // block) >= 1024
    if rocm:
        keys, launch, processors = 16 if block == 64 or float8 else 32, triton.Launch(4, 1), 256
    else:
        warps, processors = (8, 132) if block == 64 else (4, 264)
        keys = 16 if wide else 64 if block == 64 and not float8 else 32
        stages = 2 if wide or keys == 64 else 4 if float8 and many else 3
        launch = triton.Launch(num_warps=warps, num_stages=stages)
    programs = tokens * -(-heads // block)
    start_up = 4  # what starting a program and adding up a split costs, in tiles of keys

    def rounds(splits: int) -> int:
        waves = -(-programs * splits // processors)
        return waves * (-(-width // (keys * splits)) + (start_up if splits > 1 else 0))

    splits = min((1, 2, 4, 8, 16, 32), key=rounds)
    return Tiles(block, keys, splits, launch, rocm)


def sparse_mla(
    q: jax.Array,
    latents: jax.Array,
    indices: jax.Array,
    scale: float,
    layer: int | jax.Array,
    latent_scales: jax.Array | None,
    *,
    interpret: bool = False,
    tiles: Tiles | None = None,
) -> jax.Array:
    """The kernel behind `pallas_kernels.sparse_mla.sparse_mla`, which gives the shapes."""
    run = functools.partial(_run, scale=scale, interpret=interpret)
    arrays: tuple[jax.Array, ...] = (q, latents, indices, jnp.asarray(layer, jnp.int32).reshape(1))
    arrays += () if latent_scales is None else (latent_scales,)
    choose = functools.partial(
        choose_tiles, q.shape[0], q.shape[1], indices.shape[1], float8=latent_scales is not None,
        wide=wide_rows(q),
    )  # fmt: skip
    if tiles is not None or interpret:
        return run(tiles or choose(rocm=False), *arrays)
    return triton.per_platform(run, *arrays, cuda=choose(rocm=False), rocm=choose(rocm=True))


def _run(
    tiles: Tiles,
    q: jax.Array,
    latents: jax.Array,
    indices: jax.Array,
    layer: jax.Array,
    *latent_scales: jax.Array,
    scale: float,
    interpret: bool,
) -> jax.Array:
    tokens, heads, dim = q.shape
    width = indices.shape[1]
    head_blocks = -(-heads // tiles.heads)
    split_tiles = -(-width // (tiles.keys * tiles.splits))
    kernel = functools.partial(
        _attend,
        heads=heads,
        block=max(16, tiles.heads),
        block_stride=tiles.heads,
        keys=tiles.keys,
        split_tiles=split_tiles,
        width=width,
        scale=scale * LOG2_E,
        split=tiles.splits > 1,
        rocm=tiles.rocm,
    )
    single = jax.ShapeDtypeStruct((tokens, heads, dim), q.dtype)
    if tiles.splits == 1:
        out_shape: object = single
    else:
        out_shape = [
            jax.ShapeDtypeStruct((tokens, tiles.splits, heads, dim), jnp.float32),
            jax.ShapeDtypeStruct((tokens, tiles.splits, heads), jnp.float32),
        ]
    out = triton.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=(tokens, head_blocks, tiles.splits),
        cuda=tiles.launch,
        rocm=tiles.launch,
        interpret=interpret,
        name="sparse_mla",
    )(layer, q, indices, latents, *latent_scales)
    if tiles.splits == 1:
        return out
    return triton.pallas_call(
        functools.partial(_combine, splits=tiles.splits, dim=dim),
        out_shape=single,
        grid=(tokens, heads),
        cuda=triton.Launch(num_warps=4),
        rocm=triton.Launch(num_warps=4, num_stages=1),
        interpret=interpret,
        name="sparse_mla_combine",
    )(*out)


def _attend(
    layer_ref: Any,
    q_ref: Any,
    indices_ref: Any,
    latents_ref: Any,
    *refs: Any,
    heads: int,
    block: int,
    block_stride: int,
    keys: int,
    split_tiles: int,
    width: int,
    scale: float,
    split: bool,
    rocm: bool,
) -> None:
    """One block of heads of one query over one split of its keys."""
    scales_ref = refs[0] if len(refs) == (3 if split else 2) else None
    out_refs = refs[-2:] if split else refs[-1:]
    dim = q_ref.shape[2]
    token, head_block, part = (triton.program_id(axis) for axis in range(3))
    layer = layer_ref[0]
    row = jnp.arange(block)
    head = head_block * block_stride + row
    is_head = (row < block_stride) & (head < heads)
    safe_head = jnp.where(is_head, head, 0)
    begin = part * split_tiles * keys

    def rows_at(tile: int | jax.Array) -> jax.Array:
        column = begin + tile * keys + jnp.arange(keys)
        return triton.load(indices_ref.at[token, column], mask=column < width, other=-1)

    load_tile = tile_loader(latents_ref, scales_ref, layer, dim, rocm)
    column = jnp.arange(dim)
    q = triton.load(q_ref.at[token, safe_head[:, None], column[None, :]])

    def body(tile: jax.Array, carry: tuple) -> tuple:
        *sums, rows = carry
        rows_ahead = rows_at(tile + 1)
        valid = rows >= 0
        some = None if rocm else begin + tile * keys < width
        return (*attend_tile(q, load_tile(rows, valid), valid[None, :], scale, some, *sums), rows_ahead)

    largest, total, acc, _ = jax.lax.fori_loop(0, split_tiles, body, (*empty_sums(block, dim), rows_at(0)))
    some = total > 0
    out = jnp.where(some[:, None], acc / jnp.where(some, total, 1)[:, None], 0)
    target = (token, part) if split else (token,)
    triton.store(
        out_refs[0].at[(*target, head[:, None], column[None, :])],
        out.astype(out_refs[0].dtype),
        mask=is_head[:, None],
    )
    if split:
        weight = jnp.where(some, largest + jnp.log2(jnp.where(some, total, 1)), -jnp.inf)
        triton.store(out_refs[1].at[token, part, head], weight, mask=is_head)


def empty_sums(block: int, dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(largest score, denominator, numerator) of a softmax over nothing."""
    largest = jnp.full((block,), _LOWEST, jnp.float32)
    return largest, jnp.zeros((block,), jnp.float32), jnp.zeros((block, dim), jnp.float32)


def attend_tile(
    q: jax.Array,
    latents: jax.Array,
    valid: jax.Array,
    scale: float,
    some: jax.Array | None,
    largest: jax.Array,
    total: jax.Array,
    acc: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A softmax's running sums, in powers of 2, after one more tile; valid broadcasts to [queries, keys].

    some: a scalar, False only where no key of the tile is valid. The weights are found under this condition
    because of the scores: where Triton sees a product flow into another one, it divides its rows alone among
    the warps, and with 64 rows half of 8 warps would repeat what the others do. It does not look into a
    condition, so the warps divide the keys too. None for no condition.
    """
    scores = triton.dot(q, latents, trans_b=True)

    def weigh(scores: jax.Array) -> tuple[jax.Array, ...]:
        scores = jnp.where(valid, scores * scale, -jnp.inf)
        new_largest = jnp.maximum(largest, scores.max(axis=1))
        weights = jnp.exp2(scores - new_largest[:, None])
        return new_largest, jnp.exp2(largest - new_largest), weights.astype(latents.dtype)

    def skip(scores: jax.Array) -> tuple[jax.Array, ...]:
        return largest, jnp.ones_like(largest), jnp.zeros_like(scores, latents.dtype)

    new_largest, fade, weights = weigh(scores) if some is None else jax.lax.cond(some, weigh, skip, scores)
    acc = acc * fade[:, None] + triton.dot(weights, latents)
    # The weights as they were multiplied, and after the product, behind which their sum hides.
    total = total * fade + weights.astype(jnp.float32).sum(axis=1)
    return new_largest, total, acc


def tile_loader(
    latents_ref: Any, scales_ref: Any, layer: jax.Array, dim: int, rocm: bool
) -> Callable[..., jax.Array]:
    """Gathers rows [keys] of latents, dequantised if there are scales: [keys, dim], zeros where not valid.

    On ROCm float8_e4m3fn is widened with integer operations, because gfx942 does not convert it: its seven
    lower bits, shifted, are the exponent and mantissa of a float16 that is 2**-8 of its value. (A NaN comes
    out as a number.)
    """

    def widen(values: jax.Array, scale: jax.Array) -> jax.Array:
        if not rocm:
            return values.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)
        bits = jax.lax.bitcast_convert_type(values, jnp.int8).astype(jnp.int16)
        bits = (bits << 7 & 0x3F80) | (bits & -(2**15))
        small = jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
        product = jax.lax.bitcast_convert_type(small * (scale.astype(jnp.float32) * 2.0**8), jnp.int32)
        # Exact in bfloat16, which is the upper half.
        return jax.lax.bitcast_convert_type((product >> 16).astype(jnp.int16), jnp.bfloat16)

    def load(rows: jax.Array, valid: jax.Array | None = None) -> jax.Array:
        def rows_of(ref: Any, *columns: jax.Array) -> jax.Array:
            spread = (slice(None), *(None for _ in range(columns[0].ndim - 1)))
            at = ref.at[(layer, rows[spread], *columns)]
            return triton.load(at) if valid is None else triton.load(at, mask=valid[spread], other=0.0)

        if scales_ref is None:
            return rows_of(latents_ref, jnp.arange(dim)[None, :])
        # In three dimensions, so that a thread multiplies its values of one group by one scale.
        group = jnp.arange(dim // GROUP)[None, :]
        column = group[:, :, None] * GROUP + jnp.arange(GROUP)[None, None, :]
        scaled = widen(rows_of(latents_ref, column), rows_of(scales_ref, group)[:, :, None])
        return scaled.reshape(rows.shape[0], dim)

    return load


def _combine(partial_ref: Any, weight_ref: Any, out_ref: Any, *, splits: int, dim: int) -> None:
    """Sums one head's splits, each weighted by its share of the softmax's denominator."""
    token, head = triton.program_id(0), triton.program_id(1)
    part = jnp.arange(splits)
    weights = triton.load(weight_ref.at[token, part, head])
    largest = jnp.maximum(weights.max(), _LOWEST)
    shares = jnp.exp2(weights - largest)
    total = shares.sum()
    shares = shares / jnp.where(total > 0, total, 1)
    column = jnp.arange(dim)
    partial = triton.load(partial_ref.at[token, part[:, None], head, column[None, :]])
    out_ref[token, head, :] = (partial * shares[:, None]).sum(axis=0).astype(out_ref.dtype)
