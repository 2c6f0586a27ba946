"""The inner loop of the matmul kernels: one tile of rows against one tile of weight rows, float8 included.

Products of float8 values are exact, and one step of the loop lies inside one block of 128 channels, so the
scales multiply a step's partial product: nothing is dequantised on the way in.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels import triton
from pallas_kernels.float8_blocks import BLOCK, FLOAT8, INVERSE_MAX


@dataclasses.dataclass(frozen=True)
class Tile:
    """rows x columns of the result, `inner` channels a step; `group` row tiles run side by side for the
    cache's sake: programs in flight then share weights and rows."""

    rows: int
    columns: int
    inner: int
    group: int
    launch: triton.Launch


def rocm_operands() -> str:
    """What float8_e4m3fn operands are multiplied as on the default device. CDNA 3 (gfx942) has no such
    products: there the same exact ones are made of bfloat16 operands."""
    arch = str(getattr(jax.devices()[0], "compute_capability", ""))
    return "bfloat16" if arch.startswith("gfx94") else "float8_e4m3fn"


def tile_of_program(program: jax.Array, column_tiles: int, group: int) -> tuple[jax.Array, jax.Array]:
    """(row tile, column tile): columns run inside a group of `group` row tiles."""
    within = program % (group * column_tiles)
    return program // (group * column_tiles) * group + within % group, within // group


def quantize_rows(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[rows, 128] -> float8 values and one scale a row, the arithmetic of `quantize_activations`."""
    scales = scales_of_rows(rows)
    return scaled_down(rows, scales), scales


def scales_of_rows(rows: jax.Array) -> jax.Array:
    """[rows] float32 scales that bring the largest value of each row, [rows, 128], to float8's largest."""
    largest = jnp.max(jnp.abs(rows.astype(jnp.float32)), axis=1)
    return jnp.where(largest > 0, largest * INVERSE_MAX, 1.0)


def scaled_down(rows: jax.Array, scales: jax.Array) -> jax.Array:
    """[rows, 128] float8 values of rows over their scales [rows]."""
    return (rows.astype(jnp.float32) * (1 / scales)[:, None]).astype(FLOAT8)


def tile_product(
    tile: Tile,
    channels: int,
    load_rows: Callable[[jax.Array], tuple[jax.Array, jax.Array | None]],
    load_weights: Callable[[jax.Array, int], tuple[jax.Array, jax.Array | None]],
    *,
    parts: int,
    dot_dtype: jnp.dtype,
) -> tuple[jax.Array, ...]:
    """`parts` products [rows, width] float32 of the same rows, at most 128 wide.

    load_rows(start) -> ([rows, inner], scales [rows] or None); load_weights(start, part) -> ([width, inner],
    their one scale or None), both for channels start .. start + inner. Operands are cast to dot_dtype, which
    must hold them exactly.
    """
    # A step lies inside one block of 128 channels, few enough for sums inside the tensor core.
    multiply = triton.float8_dot if dot_dtype == FLOAT8 else partial(triton.dot, trans_b=True)

    def step(i: jax.Array, accumulators: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start = i * tile.inner
        rows, row_scales = load_rows(start)
        rows = rows.astype(dot_dtype)
        results = []
        for part, accumulator in enumerate(accumulators):
            weights, scale = load_weights(start, part)
            product = multiply(rows, weights.astype(dot_dtype))
            if scale is not None:
                product = product * (scale if row_scales is None else (row_scales * scale)[:, None])
            results.append(accumulator + product)
        return tuple(results)

    zeros = jnp.zeros((tile.rows, min(tile.columns, BLOCK)), jnp.float32)
    return jax.lax.fori_loop(0, channels // tile.inner, step, (zeros,) * parts)


def fitted(tile: Tile, columns: int) -> Tile:
    """The tile, one block wide where its columns do not divide those of the result."""
    return tile if columns % tile.columns == 0 else dataclasses.replace(tile, columns=BLOCK)


def column_parts(tile: Tile) -> tuple[int, int]:
    """(parts, their width) of a tile's columns: a part has one scale, and its partial product fits in
    registers beside all sums. ValueError for a width of several blocks and a bit."""
    width = min(tile.columns, BLOCK)
    if tile.columns % width:
        raise ValueError(f"a tile's columns must be at most {BLOCK} or a multiple of it, got {tile.columns}")
    return tile.columns // width, width


def block_of(channel: jax.Array) -> jax.Array:
    """The block of a channel or column; both are positive, which spares the rounding of `//`."""
    return jax.lax.div(channel, jnp.asarray(BLOCK, channel.dtype))
