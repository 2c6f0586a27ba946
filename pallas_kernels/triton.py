"""The one place that touches Pallas-Triton: launch parameters, masked memory access and dots.

Pallas-Triton is the only Pallas backend that runs on both ROCm and CUDA; it is deprecated since jax 0.11
without a removal date. Kernel bodies use only the names of this module and `jax.experimental.pallas`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.extend.core import Primitive
from jax.interpreters import mlir

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


_float8_dot = Primitive("float8_dot")  # a @ b.T of float8, summed in the tensor core
_float8_dot.def_abstract_eval(
    lambda a, b: jax.core.ShapedArray((a.shape[0], b.shape[0]), jnp.dtype("float32"))
)
mlir.register_lowering(
    _float8_dot, mlir.lower_fun(functools.partial(plgpu.dot, trans_b=True), multiple_results=False)
)


def _lower_float8_dot() -> bool:
    """Teaches Pallas-Triton the primitive, by private names; False where these names are missing."""
    try:
        from jax._src.pallas.triton import lowering
        from jaxlib.mlir import ir

        general: Any = lowering.triton_lowering_rules[lax.dot_general_p]
        register = lowering.register_lowering
    except (ImportError, AttributeError, KeyError):
        return False

    @register(_float8_dot)
    def rule(ctx: Any, a: Any, b: Any) -> Any:
        result = general(
            ctx,
            a,
            b,
            dimension_numbers=(((1,), (1,)), ((), ())),
            out_sharding=None,
            precision=None,
            preferred_element_type=jnp.float32,
        )
        if ctx.context.platform == "cuda":
            # At 0, the default, Triton refuses asynchronous products of float8 on Hopper.
            channels = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), ctx.avals_in[0].shape[1])
            operation: Any = result.owner
            operation.attributes["maxNumImpreciseAcc"] = channels
        return result

    return True


_HAS_FLOAT8_DOT = _lower_float8_dot()


def float8_dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """[m, k] x [n, k] -> a @ b.T in float32, of float8 operands over few channels.

    On Hopper the tensor core keeps about 14 bits of the running sum (DeepSeek-V3 Technical Report, section
    3.3.2, which takes the sum over to float32 every 128 channels for that reason): with k of 128 that costs
    much less than the operands' own rounding. Other devices sum as `dot` does.
    """
    return _float8_dot.bind(a, b) if _HAS_FLOAT8_DOT else dot(a, b, trans_b=True)


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


# Pallas-Triton computes element offsets as signed 32-bit integers for arrays of up to 2**32 bytes, as 64-bit
# ones above: in a one-byte array of 2 to 4 GiB they would wrap around.
_LARGEST_OFFSET = 2**31
_WIDE_OFFSET_BYTES = 2**32

_declare_rows = Primitive("declare_rows")
_declare_rows.def_abstract_eval(
    lambda array, *, rows: jax.core.ShapedArray((rows, *array.shape[1:]), array.dtype)
)
mlir.register_lowering(_declare_rows, lambda _, array, *, rows: [array])


def wide_offsets(array: jax.Array, largest: int = _LARGEST_OFFSET) -> jax.Array:
    """The same buffer, declared with enough leading rows for 64-bit offsets if 32-bit ones would wrap.

    For an operand of a compiled kernel only: the declared rows past the array's own do not exist. The shape
    a kernel sees decides its offsets' width; the leading dimension is in no stride, so nothing else changes.
    `largest` is the first offset that wraps.
    """
    size = array.size * array.dtype.itemsize
    if array.size <= largest or size > _WIDE_OFFSET_BYTES:
        return array
    return _declare_rows.bind(array, rows=array.shape[0] * (_WIDE_OFFSET_BYTES // size + 1))


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
        def launched(launch: Launch, *operands: jax.Array) -> Any:
            return build(launch)(*map(wide_offsets, operands))

        # A declared operand exists inside a compiled program only.
        run = jax.jit(launched, static_argnums=0, inline=True)
        return per_platform(run, *args, cuda=cuda, rocm=rocm)

    return call
