"""The one place that touches Pallas-Triton: launch parameters, masked memory access and dots.

Pallas-Triton is the only Pallas backend that runs on both ROCm and CUDA; it is deprecated since jax 0.11
without a removal date. Kernel bodies use only the names of this module and `jax.experimental.pallas`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

BlockSpec = pl.BlockSpec
cdiv = pl.cdiv
program_id = pl.program_id
load = plgpu.load
store = plgpu.store
barrier = plgpu.debug_barrier  # among the threads of one program

_PRECISIONS = {
    "ieee": lax.Precision.HIGHEST,
    "tf32": lax.Precision.DEFAULT,
    "tf32x3": lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """Launch parameters of one kernel on one platform.

    A ROCm warp is a 64-lane wave, so the same `num_warps` means twice the threads there.
    """

    num_warps: int = 4
    num_stages: int = 2


def dot(
    a: jax.Array, b: jax.Array, *, trans_a: bool = False, trans_b: bool = False, precision: str = "ieee"
) -> jax.Array:
    """[m, k] x [k, n] product in float32 (int32 for int8); `trans_a`, `trans_b` transpose an operand first.

    Both operands share a dtype. `precision` matters for float32 operands only: "ieee", "tf32" (CUDA's
    tensor cores; on ROCm full float32 is asked for by "ieee") or "tf32x3" (compiled kernels only: the
    CPU interpreter has no such algorithm).
    """
    chosen = _PRECISIONS[precision] if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b, trans_a=trans_a, trans_b=trans_b, precision=chosen)


def per_platform(function: Callable[..., Any], *args: jax.Array, cuda: Any, rocm: Any) -> Any:
    """`function(config, *args)` with the configuration of the platform that the program is lowered for.

    Exactly one branch is lowered, so this costs tracing time only, and ahead-of-time lowering for another
    platform than the one present picks that platform's configuration.
    """
    if cuda == rocm:
        return function(cuda, *args)
    return lax.platform_dependent(
        *args,
        cuda=lambda *operands: function(cuda, *operands),
        rocm=lambda *operands: function(rocm, *operands),
    )


def pallas_call(
    kernel: Callable[..., None],
    *,
    out_shape: Any,
    grid: Sequence[int],
    in_specs: Sequence[pl.BlockSpec] | None = None,
    out_specs: Any = None,
    cuda: Launch = Launch(),
    rocm: Launch = Launch(num_stages=1),
    input_output_aliases: Mapping[int, int] | None = None,
    interpret: bool = False,
    name: str | None = None,
) -> Callable[..., Any]:
    """`pl.pallas_call` on the Triton backend with launch parameters for each platform.

    Specs left out pass whole arrays, which is how a kernel takes a stacked array and indexes it by layer.
    `interpret=True` runs the kernel body in the Pallas interpreter on any backend.
    """
    optional: dict[str, Any] = {}
    if in_specs is not None:
        optional["in_specs"] = list(in_specs)
    if out_specs is not None:
        optional["out_specs"] = out_specs

    def build(launch: Launch) -> Callable[..., Any]:
        return pl.pallas_call(
            kernel,
            out_shape=out_shape,
            grid=tuple(grid),
            compiler_params=plgpu.CompilerParams(num_warps=launch.num_warps, num_stages=launch.num_stages),
            input_output_aliases=dict(input_output_aliases or {}),
            interpret=interpret,
            name=name,
            **optional,
        )

    if interpret:
        return build(cuda)

    def call(*args: jax.Array) -> Any:
        return per_platform(lambda launch, *operands: build(launch)(*operands), *args, cuda=cuda, rocm=rocm)

    return call
