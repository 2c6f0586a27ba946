"""The routed experts on Pallas-Triton: gate and up with the activation, down, then the weighted sum.

Choices are laid out in tiles of one expert (expert_tiles.py). A tile reads its expert's number from a table
and leaves at once when it is empty, so the grid is static for any routing. The weighted sum gathers every
token's k rows in slot order: deterministic, without atomics.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton
from pallas_kernels.expert_tiles import ExpertTiles, expert_tiles
from pallas_kernels.float8_blocks import BLOCK, FLOAT8, quantize_activations
from pallas_kernels.matmul_tile import (
    Tile,
    block_of,
    column_parts,
    fitted,
    quantize_rows,
    rocm_operands,
    scaled_down,
    scales_of_rows,
    tile_of_program,
    tile_product,
)
from pallas_kernels.swiglu import clamped_swiglu

Weight = tuple[jax.Array, jax.Array | None]
_SMALL_TILE = 32  # up to here rows are quantised where they are loaded, else once beforehand


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the experts run on one platform. Both tiles have the same rows; the first one's columns are those
    of gate and of up. operands: the dtype as which float8 values are multiplied, one that holds them
    exactly; rows that are quantised beforehand are stored in it."""

    gate_up: Tile
    down: Tile
    operands: str = "float8_e4m3fn"


def supports(x: jax.Array, gate_up: Weight, down: Weight) -> bool:
    """bfloat16 rows; weights in bfloat16 or float8; both dimensions multiples of 128."""
    _, _, inner, dim = gate_up[0].shape
    dtypes = {gate_up[0].dtype, down[0].dtype}
    return (
        x.dtype == jnp.bfloat16
        and dtypes in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(FLOAT8)})
        and dim % BLOCK == 0
        and inner % BLOCK == 0
    )


# NVIDIA's plans for quantised rows, by rows a tile; from 64 rows on Hopper multiplies float8 asynchronously.
# Measured on an H200, 8192 tokens, all products and gate and up alone: 5.00 and 3.21 ms with 128 rows and 8
# warps (16 warps, without the few spills: 5.56 and 3.53), 5.70 and 3.87 with 64 rows and 4 warps (8 warps:
# 6.38 and 4.15).
_HOPPER = {
    64: Plan(
        Tile(64, 128, BLOCK, 4, triton.Launch(num_warps=4, num_stages=2)),
        Tile(64, 128, BLOCK, 4, triton.Launch(num_warps=4, num_stages=3)),
    ),
    128: Plan(
        Tile(128, 128, BLOCK, 4, triton.Launch(num_warps=8, num_stages=3)),
        Tile(128, 256, BLOCK, 4, triton.Launch(num_warps=8, num_stages=3)),
    ),
}


def cuda_plan(choices: int, experts: int, inner: int, float8: bool, quantized: bool) -> Plan:
    """Tiles for NVIDIA: narrow ones stream weights for few rows, wide ones fill the tensor cores.

    Measured on an H200 with float8 weights and rows: 32 tokens 1.14 ms with 128 columns, 1.18 with 64.
    """
    rows = _tile_rows(choices, experts)
    if rows <= _SMALL_TILE:
        columns = 32 if inner < 1024 else 128 if rows == 16 else 64
        launch = triton.Launch(num_warps=4, num_stages=3)
        return Plan(Tile(rows, columns, BLOCK, 1, launch), Tile(rows, max(64, columns), BLOCK, 1, launch))
    if quantized:
        return _HOPPER[rows]
    if float8:
        tile = Tile(64, 128, BLOCK, 4, triton.Launch(num_warps=8, num_stages=3))
        return Plan(tile, tile)
    tile = Tile(rows, 128, BLOCK // 2, 2, triton.Launch(num_warps=8 if rows == 128 else 4, num_stages=3))
    return Plan(tile, tile)


def rocm_plan(choices: int, experts: int) -> Plan:
    """Tiles for AMD: one stage, at most 64 KiB of LDS (gfx942's limit), 4 warps of 64 lanes."""
    rows = min(64, _tile_rows(choices, experts))
    launch = triton.Launch(num_warps=4, num_stages=1)
    if rows <= _SMALL_TILE:
        columns = 64 if rows == 16 else 32  # 32 x 64 spills scalar registers on gfx942
        return Plan(Tile(rows, columns, BLOCK, 1, launch), Tile(rows, 64, BLOCK, 1, launch), rocm_operands())
    return Plan(Tile(rows, 128, 64, 2, launch), Tile(rows, 128, 64, 2, launch), rocm_operands())


def _tile_rows(choices: int, experts: int) -> int:
    an_expert = choices / min(experts, choices)
    return 16 if an_expert <= 16 else 32 if an_expert <= 32 else 64 if an_expert <= 128 else 128


def grouped_mlp_triton(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    gate_up: Weight,
    down: Weight,
    *,
    limit: float,
    quantize_activations: bool,
    interpret: bool = False,
    plan: Plan | None = None,
) -> jax.Array:
    """`grouped_mlp` with kernels; `plan` overrides the platform's own (for tuning and tests)."""
    run = partial(_run, limit=limit, quantized=quantize_activations, interpret=interpret)
    arrays: tuple[Any, ...] = (x, expert_ids, expert_weights, gate_up, down)
    if plan is not None:
        return run(plan, *arrays)
    sizes = expert_ids.size, gate_up[0].shape[0]
    cuda = cuda_plan(*sizes, gate_up[0].shape[2], gate_up[1] is not None, quantize_activations)
    if interpret:
        return run(cuda, *arrays)
    return triton.per_platform(run, *arrays, cuda=cuda, rocm=rocm_plan(*sizes))


def _run(
    plan: Plan,
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    gate_up: Weight,
    down: Weight,
    *,
    limit: float,
    quantized: bool,
    interpret: bool,
) -> jax.Array:
    hidden, tiles = expert_hidden(
        plan, x, expert_ids, gate_up, limit=limit, quantized=quantized, interpret=interpret
    )
    late = quantized and plan.down.rows <= _SMALL_TILE
    product = Product(x.shape[1], _dot_dtype(plan, quantized), late)
    out, _ = _expert_product(plan.down, hidden, down, product, tiles=tiles, interpret=interpret)
    rows = tiles.destinations.reshape(expert_ids.shape)
    return combine(out, rows, expert_weights, interpret=interpret)


def expert_hidden(
    plan: Plan,
    x: jax.Array,
    expert_ids: jax.Array,
    gate_up: Weight,
    *,
    limit: float,
    quantized: bool,
    interpret: bool = False,
) -> tuple[Weight, ExpertTiles]:
    """Activations of every choice, [tiles * rows, inner] with scales if quantised, and its layout."""
    experts, _, inner, _ = gate_up[0].shape
    tiles = expert_tiles(expert_ids.reshape(-1), experts, plan.gate_up.rows)
    early = quantized and plan.gate_up.rows > _SMALL_TILE
    if early and plan.gate_up.columns != BLOCK:
        raise ValueError(
            f"one scale per {BLOCK} results: a tile of {plan.gate_up.columns} columns cannot give it"
        )
    product = Product(
        inner,
        _dot_dtype(plan, quantized),
        quantized and not early,
        slots=expert_ids.shape[1],
        limit=limit,
        quantize_out=early,
    )
    rows: Weight = (x, None)
    if early:
        values, scales = quantize_activations(x)
        rows = values.astype(product.dot_dtype), scales
    return _expert_product(plan.gate_up, rows, gate_up, product, tiles=tiles, interpret=interpret), tiles


def _dot_dtype(plan: Plan, quantized: bool) -> jnp.dtype:
    return jnp.dtype(plan.operands if quantized else jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Product:
    """What one launch computes: `columns` results a row. quantize_rows: round rows to float8 as they are
    loaded. slots: rows are gathered, row = choice // slots, and weights are gate and up halves joined by the
    activation with `limit`; None: rows are those of the tiles. quantize_out: results become float8 values in
    dot_dtype."""

    columns: int
    dot_dtype: jnp.dtype
    quantize_rows: bool
    slots: int | None = None
    limit: float = 0.0
    quantize_out: bool = False


def _expert_product(
    tile: Tile, rows: Weight, weights: Weight, product: Product, *, tiles: ExpertTiles, interpret: bool
) -> Weight:
    """One product of every tile with its expert's weights: [tiles * rows, columns], scales if quantised."""
    tile = fitted(tile, product.columns)
    inputs = {"rows": rows[0], "row_scales": rows[1], "weights": weights[0], "weight_scales": weights[1]}
    inputs |= {"sources": tiles.sources, "experts": tiles.experts}
    inputs = {name: array for name, array in inputs.items() if array is not None}
    row_tiles = tiles.experts.shape[0]
    shape = (row_tiles * tile.rows, product.columns)
    outputs = {
        "out": jax.ShapeDtypeStruct(shape, product.dot_dtype if product.quantize_out else jnp.bfloat16)
    }
    if product.quantize_out:
        outputs["out_scales"] = jax.ShapeDtypeStruct((shape[0], shape[1] // BLOCK), jnp.float32)
    call = triton.pallas_call(
        partial(_expert_product_kernel, (*inputs, *outputs), tile, product),
        out_shape=tuple(outputs.values()),
        grid=(triton.cdiv(row_tiles, tile.group) * tile.group * (product.columns // tile.columns),),
        cuda=tile.launch,
        rocm=tile.launch,
        interpret=interpret,
        name="expert_down" if product.slots is None else "expert_gate_up",
    )
    results = call(*inputs.values())
    return results[0], results[1] if "out_scales" in outputs else None


def _expert_product_kernel(names: tuple[str, ...], tile: Tile, product: Product, *refs: Any) -> None:
    ref = dict(zip(names, refs, strict=True))
    row_tile, column_tile = tile_of_program(triton.program_id(0), product.columns // tile.columns, tile.group)
    last = ref["experts"].shape[0] - 1
    expert = jnp.where(row_tile <= last, ref["experts"][jnp.minimum(row_tile, last)], -1)

    @pl.when(expert >= 0)
    def _() -> None:
        own_rows = pl.ds(row_tile * tile.rows, tile.rows)
        column = column_tile * tile.columns
        gathers = product.slots is not None
        index: Any = own_rows
        if gathers:
            # The source of a padding row is past the end: it computes the last token again, unused.
            index = jnp.minimum(ref["sources"][own_rows] // product.slots, ref["rows"].shape[0] - 1)

        parts, width = (2, tile.columns) if gathers else column_parts(tile)

        def load_rows(start: jax.Array) -> tuple[jax.Array, jax.Array | None]:
            values = ref["rows"][index, pl.ds(start, tile.inner)]
            if product.quantize_rows:
                return quantize_rows(values)
            return values, ref["row_scales"][index, block_of(start)] if "row_scales" in ref else None

        def load_weights(start: jax.Array, part: int) -> tuple[jax.Array, jax.Array | None]:
            place, first = ((expert, part), column) if gathers else ((expert,), column + part * width)
            values = ref["weights"][(*place, pl.ds(first, width), pl.ds(start, tile.inner))]
            if "weight_scales" not in ref:
                return values, None
            return values, ref["weight_scales"][(*place, block_of(first), block_of(start))]

        results = tile_product(
            tile, ref["rows"].shape[1], load_rows, load_weights, parts=parts, dot_dtype=product.dot_dtype
        )
        # Rounded where the reference rounds: the products, then the activation.
        outs = [result.astype(jnp.bfloat16) for result in results]
        if gathers:
            gate, up = outs
            outs = [clamped_swiglu(gate, up, product.limit)]
        for part, out in enumerate(outs):
            first = column + part * width
            if product.quantize_out:
                scales = scales_of_rows(out)
                # stored before they are used: the other order spills registers of the loop on NVIDIA
                ref["out_scales"][own_rows, block_of(first)] = scales
                out = scaled_down(out, scales)
            ref["out"][own_rows, pl.ds(first, width)] = out.astype(ref["out"].dtype)


def combine(out: jax.Array, rows: jax.Array, weights: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Weighted sums of rows in slot order, in float32.

    out: [all rows, dim]; rows: [tokens, k] int32, past the end for a slot that takes no part; weights:
    [tokens, k]. Returns [tokens, dim] in out.dtype.
    """
    tokens, k = rows.shape
    dim = out.shape[1]
    columns = min(1024, dim & -dim)

    def kernel(out_ref: Any, rows_ref: Any, weights_ref: Any, result_ref: Any) -> None:
        token = triton.program_id(0)
        span = pl.ds(triton.program_id(1) * columns, columns)
        total = jnp.zeros((columns,), jnp.float32)
        for slot in range(k):
            row = rows_ref[token, slot]
            value = out_ref[jnp.minimum(row, out.shape[0] - 1), span].astype(jnp.float32)
            total += jnp.where(row < out.shape[0], value * weights_ref[token, slot], 0.0)
        result_ref[token, span] = total.astype(out.dtype)

    launch = triton.Launch(num_warps=4, num_stages=1)
    return triton.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((tokens, dim), out.dtype),
        grid=(tokens, dim // columns),
        cuda=launch,
        rocm=launch,
        interpret=interpret,
        name="expert_combine",
    )(out, rows, weights.astype(jnp.float32))
