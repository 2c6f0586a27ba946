"""Routed experts and block-scaled matmul at the released model's widths, whole and an eighth of them.

MI300X multiplies no float8_e4m3fn: there the kernels make the same exact products of bfloat16 operands, so
each chip has its own cases.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import block_scaled_kernel, grouped_mlp_kernel
from tests.amd.gate import Case

DIM, SLOTS, EXPERTS = 4096, 8, 288
CHIPS = {"gfx950": "float8_e4m3fn", "gfx942": "bfloat16"}


def struct(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def experts(tokens: int, inner: int, float8: bool, quantized: bool, chip: str) -> Case:
    plan = grouped_mlp_kernel.rocm_plan(tokens * SLOTS, EXPERTS)
    plan = dataclasses.replace(plan, operands=CHIPS[chip])
    dtype = jnp.float8_e4m3fn if float8 else jnp.bfloat16
    blocks = (DIM // 128, inner // 128)
    gate_up = struct((EXPERTS, 2, inner, DIM), dtype), struct((EXPERTS, 2, blocks[1], blocks[0]))
    down = struct((EXPERTS, DIM, inner), dtype), struct((EXPERTS, *blocks))
    function = functools.partial(
        grouped_mlp_kernel.grouped_mlp_triton, limit=10.0, quantize_activations=quantized, plan=plan
    )
    kind = "fp8 x fp8" if quantized else "fp8" if float8 else "bf16"
    return Case(
        f"experts {kind}, {tokens} tokens, inner {inner}, {chip}",
        function,
        (
            struct((tokens, DIM), jnp.bfloat16),
            struct((tokens, SLOTS), jnp.int32),
            struct((tokens, SLOTS)),
            gate_up if float8 else (gate_up[0], None),
            down if float8 else (down[0], None),
        ),
        dots=("expert_gate_up", "expert_down"),
        chips=(chip,),
    )


def matmul(tokens: int, quantized: bool, chip: str) -> Case:
    plan = dataclasses.replace(block_scaled_kernel.rocm_plan(tokens), operands=CHIPS[chip])
    function = functools.partial(
        block_scaled_kernel.block_scaled_matmul_triton, quantized=quantized, plan=plan
    )
    return Case(
        f"block-scaled matmul{', fp8 x fp8' if quantized else ''}, {tokens} tokens, {chip}",
        function,
        (
            struct((tokens, DIM), jnp.bfloat16),
            struct((12288, DIM), jnp.float8_e4m3fn),
            struct((96, DIM // 128)),
        ),
        dots=("block_scaled_matmul",),
        chips=(chip,),
    )


def cases() -> list[Case]:
    kinds = ((True, True), (True, False), (False, False))
    found = []
    for chip in CHIPS:
        found += [experts(t, 2048, *kind, chip) for t in (32, 1024, 8192) for kind in kinds]
        found += [experts(t, 256, True, True, chip) for t in (32, 8192)]
        found += [matmul(t, quantized, chip) for t in (1, 32, 8192) for quantized in (True, False)]
    return found
