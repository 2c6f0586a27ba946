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
    cache's sake: programs in flight then share weights and rows. transposed: multiply weights by rows and
    not rows by weights. Hopper's tensor cores take the left operand from registers, so weights that are
    converted on the way need not pass through shared memory again."""

    rows: int
    columns: int
    inner: int
    group: int
    launch: triton.Launch
    transposed: bool = False


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
    inner], scale: a scalar or [columns] or None), both for channels start .. start + inner. Operands are cast
    to dot_dtype, which must hold them exactly.
    """

    def spread(scales: jax.Array, is_left: bool) -> jax.Array:
        """Scales of one operand's rows over the result; a scalar as it is."""
        return scales if scales.ndim == 0 else scales[:, None] if is_left else scales[None, :]

    def step(i: jax.Array, accumulators: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start = i * tile.inner
        rows, row_scales = load_rows(start)
        rows = rows.astype(dot_dtype)
        results = []
        for half, accumulator in enumerate(accumulators):
            weights, scale = load_weights(start, half)
            weights = weights.astype(dot_dtype)
            left, right = (weights, rows) if tile.transposed else (rows, weights)
            product = triton.dot(left, right, trans_b=True)
            if scale is not None:
                factor = spread(scale, tile.transposed)
                if row_scales is not None:
                    factor = spread(row_scales, not tile.transposed) * factor
                product = product * factor
            results.append(accumulator + product)
        return tuple(results)

    shape = (tile.columns, tile.rows) if tile.transposed else (tile.rows, tile.columns)
    zeros = jnp.zeros(shape, jnp.float32)
    results = jax.lax.fori_loop(0, channels // tile.inner, step, (zeros,) * halves)
    return tuple(result.T for result in results) if tile.transposed else results


def load_scale(scales: Any, index: tuple, column: jax.Array, start: jax.Array, columns: int) -> jax.Array:
    """The weight scale of a [columns, inner] tile: a scalar inside one block, else [columns]."""
    if columns <= BLOCK:
        return scales[(*index, column // BLOCK, start // BLOCK)]
    blocks = (column + jnp.arange(columns)) // BLOCK
    return triton.load(scales.at[(*index, blocks, start // BLOCK)])
