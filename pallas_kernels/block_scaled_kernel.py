"""Block-scaled float8 matmul on Pallas-Triton."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton
from pallas_kernels.float8_blocks import BLOCK, FLOAT8, quantize_activations
from pallas_kernels.matmul_tile import (
    Tile,
    load_scale,
    quantize_rows,
    rocm_operands,
    tile_of_program,
    tile_product,
)

_FEW_ROWS = 64  # up to here activations are quantised where they are loaded, else once beforehand


@dataclasses.dataclass(frozen=True)
class Plan:
    """A tile, and the dtype as which float8 values are multiplied, one that holds them exactly."""

    tile: Tile
    operands: str = "float8_e4m3fn"


def supports(x: jax.Array, values: jax.Array) -> bool:
    """bfloat16 rows; both dimensions of the weight multiples of 128."""
    columns, channels = values.shape
    return (
        x.dtype == jnp.bfloat16 and values.dtype == FLOAT8 and columns % BLOCK == 0 and channels % BLOCK == 0
    )


def cuda_plan(rows: int) -> Plan:
    """Tiles for NVIDIA."""
    if rows <= _FEW_ROWS:
        return Plan(Tile(16 if rows <= 16 else 32, 32, BLOCK, 1, triton.Launch(4, 4)))
    if rows <= 1024:
        return Plan(Tile(64, 64, BLOCK, 4, triton.Launch(4, 4)))
    return Plan(Tile(128, 128, BLOCK, 8, triton.Launch(8, 3)))


def rocm_plan(rows: int) -> Plan:
    """Tiles for AMD: one stage, at most 64 KiB of LDS."""
    tile_rows, columns = (16 if rows <= 16 else 32, 32) if rows <= _FEW_ROWS else (64, 128)
    return Plan(Tile(tile_rows, columns, BLOCK, 4, triton.Launch(4, 1)), rocm_operands())


def block_scaled_matmul_triton(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    *,
    quantized: bool,
    interpret: bool = False,
    plan: Plan | None = None,
) -> jax.Array:
    """`block_scaled_matmul` of x [rows, in] with a kernel; `plan` overrides the platform's own."""
    run = partial(_run, quantized=quantized, interpret=interpret)
    if plan is not None:
        return run(plan, x, values, scales)
    rows = x.shape[0]
    if interpret:
        return run(cuda_plan(rows), x, values, scales)
    return triton.per_platform(run, x, values, scales, cuda=cuda_plan(rows), rocm=rocm_plan(rows))


def _run(
    plan: Plan, x: jax.Array, values: jax.Array, scales: jax.Array, *, quantized: bool, interpret: bool
) -> jax.Array:
    tile = plan.tile
    rows, columns = x.shape[0], values.shape[0]
    early = quantized and rows > _FEW_ROWS
    dot_dtype = jnp.dtype(plan.operands if quantized else x.dtype)
    row_values, row_scales = x, None
    if early:
        row_values, row_scales = quantize_activations(x)
        row_values = row_values.astype(dot_dtype)
    inputs = {"rows": row_values, "row_scales": row_scales, "weights": values, "weight_scales": scales}
    inputs = {name: array for name, array in inputs.items() if array is not None}
    row_tiles = triton.cdiv(triton.cdiv(rows, tile.rows), tile.group) * tile.group
    return triton.pallas_call(
        partial(_kernel, (*inputs, "out"), tile, dot_dtype, quantized and not early),
        out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        grid=(row_tiles * (columns // tile.columns),),
        cuda=tile.launch,
        rocm=tile.launch,
        interpret=interpret,
        name="block_scaled_matmul",
    )(*inputs.values())


def _kernel(names: tuple[str, ...], tile: Tile, dot_dtype: jnp.dtype, quantize: bool, *refs: Any) -> None:
    ref = dict(zip(names, refs, strict=True))
    rows, columns = ref["out"].shape
    row_tile, column_tile = tile_of_program(triton.program_id(0), columns // tile.columns, tile.group)
    index = row_tile * tile.rows + jnp.arange(tile.rows)
    safe = jnp.minimum(index, rows - 1)
    column = column_tile * tile.columns

    def load_rows(start: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        values = ref["rows"][safe, pl.ds(start, tile.inner)]
        if quantize:
            return quantize_rows(values)
        return values, ref["row_scales"][safe, start // BLOCK] if "row_scales" in ref else None

    def load_weights(start: jax.Array, _: int) -> tuple[jax.Array, jax.Array]:
        values = ref["weights"][pl.ds(column, tile.columns), pl.ds(start, tile.inner)]
        return values, load_scale(ref["weight_scales"], (), column, start, tile.columns)

    @pl.when(row_tile * tile.rows < rows)
    def _() -> None:
        (result,) = tile_product(
            tile, ref["rows"].shape[1], load_rows, load_weights, halves=1, dot_dtype=dot_dtype
        )
        place = (index[:, None], (column + jnp.arange(tile.columns))[None, :])
        triton.store(ref["out"].at[place], result.astype(ref["out"].dtype), mask=index[:, None] < rows)
