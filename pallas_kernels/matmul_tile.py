"""The inner loop of the matmul kernels: one tile of rows against one tile of weight rows, float8 included.

Products of float8 values are exact, and one step of the loop lies inside one block of 128 channels, so the
scales multiply a step's partial product: nothing is dequantised on the way in.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

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


def multiplies_float8() -> bool:
    """Whether the default device multiplies float8_e4m3fn. CDNA 3 (gfx942) does not: there the same exact
    products are made of bfloat16 operands."""
    return not str(getattr(jax.devices()[0], "compute_capability", "")).startswith("gfx94")


def tile_of_program(program: jax.Array, column_tiles: int, group: int) -> tuple[jax.Array, jax.Array]:
    """(row tile, column tile): columns run inside a group of `group` row tiles."""
    within = program % (group * column_tiles)
    return program // (group * column_tiles) * group + within % group, within // group


def quantize_rows(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[rows, 128] -> float8 values and one scale a row, the arithmetic of `quantize_activations`."""
    wide = rows.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=1)
    scales = jnp.where(largest > 0, largest * INVERSE_MAX, 1.0)
    return (wide * (1 / scales)[:, None]).astype(FLOAT8), scales


def tile_product(
    tile: Tile,
    channels: int,
    load_rows: Callable[[jax.Array], tuple[jax.Array, jax.Array | None]],
    load_weights: Callable[[jax.Array, int], tuple[jax.Array, jax.Array | None]],
    *,
    halves: int,
    dot_dtype: jnp.dtype,
) -> tuple[jax.Array, ...]:
    """`halves` products [rows, columns] float32 of the same rows.

    load_rows(start) -> ([rows, inner], scales [rows] or None); load_weights(start, half) -> ([columns,
    inner], scale broadcastable to [rows, columns] or None), both for channels start .. start + inner.
    Operands are cast to dot_dtype, which must hold them exactly.
    """

    def step(i: jax.Array, accumulators: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start = i * tile.inner
        rows, row_scales = load_rows(start)
        rows = rows.astype(dot_dtype)
        results = []
        for half, accumulator in enumerate(accumulators):
            weights, scale = load_weights(start, half)
            product = triton.dot(rows, weights.astype(dot_dtype), trans_b=True)
            if scale is not None:
                factor = scale if row_scales is None else row_scales[:, None] * scale
                product = product * factor
            results.append(accumulator + product)
        return tuple(results)

    zeros = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    return jax.lax.fori_loop(0, channels // tile.inner, step, (zeros,) * halves)


def load_scale(scales: Any, index: tuple, column: jax.Array, start: jax.Array, columns: int) -> jax.Array:
    """The weight scale of a [columns, inner] tile: a scalar inside one block, else [1, columns]."""
    if columns <= BLOCK:
        return scales[(*index, column // BLOCK, start // BLOCK)]
    blocks = (column + jnp.arange(columns)) // BLOCK
    return triton.load(scales.at[(*index, blocks, start // BLOCK)])[None, :]
