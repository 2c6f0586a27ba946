"""Block-scaled float8 matmul on a GPU: Pallas-Triton, or XLA's matmul of the dequantised weight."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton
from pallas_kernels.float8_blocks import (
    BLOCK,
    FLOAT8,
    dequantize_blocks,
    quantize_activations,
    round_activations,
)
from pallas_kernels.matmul_tile import (
    Tile,
    block_of,
    column_parts,
    fitted,
    quantize_rows,
    rocm_operands,
    tile_of_program,
    tile_product,
)

_FEW_ROWS = 64  # up to here activations are quantised where they are loaded, else once beforehand


@dataclasses.dataclass(frozen=True)
class Plan:
    """A tile, and the dtype as which float8 values are multiplied, one that holds them exactly. tile None:
    the weight is dequantised once and multiplied by XLA."""

    tile: Tile | None
    operands: str = "float8_e4m3fn"


# NVIDIA's plan for quantised rows of more than `_FEW_ROWS`: up to 1,024, and above.
_HOPPER = (
    Plan(Tile(64, 128, BLOCK, 4, triton.Launch(4, 4))),
    Plan(Tile(128, 256, BLOCK, 8, triton.Launch(8, 3))),
)


def supports(x: jax.Array, values: jax.Array) -> bool:
    """bfloat16 rows; both dimensions of the weight multiples of 128."""
    columns, channels = values.shape
    return (
        x.dtype == jnp.bfloat16 and values.dtype == FLOAT8 and columns % BLOCK == 0 and channels % BLOCK == 0
    )


def cuda_plan(rows: int, quantized: bool) -> Plan:
    """Tiles for NVIDIA. Rows that are not quantised keep the weight's products from being float8 ones: a
    kernel then reaches 264 TFLOP/s on an H200, XLA's matmul of bfloat16 about 700, less the 4 more bytes of
    memory traffic for every weight: they break even at some 200 rows."""
    if rows <= 16:
        return Plan(Tile(16, 32, BLOCK, 1, triton.Launch(4, 4)))
    if rows <= _FEW_ROWS:
        return Plan(Tile(32, 32, BLOCK, 1, triton.Launch(2, 5)))
    if quantized:
        return _HOPPER[rows > 1024]
    return Plan(Tile(64, 64, BLOCK, 4, triton.Launch(4, 4)) if rows <= 256 else None)


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
    cuda = cuda_plan(rows, quantized)
    if interpret:
        return run(cuda, x, values, scales)
    return triton.per_platform(run, x, values, scales, cuda=cuda, rocm=rocm_plan(rows))


def _run(
    plan: Plan, x: jax.Array, values: jax.Array, scales: jax.Array, *, quantized: bool, interpret: bool
) -> jax.Array:
    if plan.tile is None:
        return _dequantized_matmul(x, values, scales, quantized=quantized)
    tile = fitted(plan.tile, values.shape[0])
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


def _dequantized_matmul(x: jax.Array, values: jax.Array, scales: jax.Array, *, quantized: bool) -> jax.Array:
    """XLA's product in x.dtype, to which either operand is rounded once more than in the kernel."""
    rows = round_activations(x).astype(x.dtype) if quantized else x
    # fused into the product, the dequantisation would keep XLA from its fastest matmul
    weight = jax.lax.optimization_barrier(dequantize_blocks(values, scales, x.dtype))
    return jnp.einsum("rc,oc->ro", rows, weight, preferred_element_type=jnp.float32).astype(x.dtype)


def _kernel(names: tuple[str, ...], tile: Tile, dot_dtype: jnp.dtype, quantize: bool, *refs: Any) -> None:
    ref = dict(zip(names, refs, strict=True))
    rows, columns = ref["out"].shape
    row_tile, column_tile = tile_of_program(triton.program_id(0), columns // tile.columns, tile.group)
    index = row_tile * tile.rows + jnp.arange(tile.rows)
    safe = jnp.minimum(index, rows - 1)
    column = column_tile * tile.columns

    parts, width = column_parts(tile)

    def load_rows(start: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        values = ref["rows"][safe, pl.ds(start, tile.inner)]
        if quantize:
            return quantize_rows(values)
        return values, ref["row_scales"][safe, block_of(start)] if "row_scales" in ref else None

    def load_weights(start: jax.Array, part: int) -> tuple[jax.Array, jax.Array]:
        first = column + part * width
        values = ref["weights"][pl.ds(first, width), pl.ds(start, tile.inner)]
        return values, ref["weight_scales"][block_of(first), block_of(start)]

    @pl.when(row_tile * tile.rows < rows)
    def _() -> None:
        results = tile_product(
            tile, ref["rows"].shape[1], load_rows, load_weights, parts=parts, dot_dtype=dot_dtype
        )
        for part, result in enumerate(results):
            place = (index[:, None], (column + part * width + jnp.arange(width))[None, :])
            triton.store(ref["out"].at[place], result.astype(ref["out"].dtype), mask=index[:, None] < rows)
