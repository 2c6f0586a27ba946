"""Which layout Pallas-Triton's compiler computes a value in, beside `triton` for the same reason as that."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

_compute_once = Primitive("compute_once")
_compute_once.def_impl(lambda a: a)
_compute_once.def_abstract_eval(lambda a: jax.core.ShapedArray(a.shape, a.dtype))
mlir.register_lowering(_compute_once, lambda _, a: [a])


def _lower_compute_once() -> bool:
    """Teaches Pallas-Triton the primitive, by private names; False where these names are missing."""
    try:
        from jax._src.pallas.triton import lowering
        from jaxlib.triton import dialect

        register = lowering.register_lowering
    except (ImportError, AttributeError):
        return False

    @register(_compute_once)
    def rule(ctx: Any, a: Any) -> Any:
        if ctx.context.platform != "cuda":
            return a
        pair = 4 // ctx.avals_in[0].dtype.itemsize
        # Declared to have an effect, it is neither repeated nor moved.
        move: Any = dialect.elementwise_inline_asm
        return move(
            [a.type], "mov.b32 $0, $1;", constraints="=r,r", pure=False, packed_element=pair, args=[a]
        )

    return True


_HAS_COMPUTE_ONCE = _lower_compute_once()


def compute_once(array: jax.Array) -> jax.Array:
    """The same 16- or 32-bit values, computed in one layout only.

    Triton moves a dot operand's change of layout up to the loads that the operand is computed from. An
    operand that is stored too is then computed twice, once in each layout. On CUDA this stops it; elsewhere
    it does nothing.
    """
    return _compute_once.bind(array) if _HAS_COMPUTE_ONCE else array
