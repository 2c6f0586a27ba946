"""Products with float8_e4m3fn weights that carry one float32 scale for a block of 128 x 128.

Activations may be quantised too, per token and 128 channels, as the released checkpoint's
`activation_scheme: dynamic` asks; the reference emulates it, so that a kernel is always compared with like.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.block_scaled_kernel import block_scaled_matmul_triton, supports
from pallas_kernels.dispatch import resolve
from pallas_kernels.float8_blocks import (
    check_scales,
    dequantize_activations,
    dequantize_blocks,
    quantize_activations,
    quantize_blocks,
    round_activations,
)

__all__ = [
    "block_scaled_matmul",
    "block_scaled_matmul_reference",
    "dequantize_activations",
    "dequantize_blocks",
    "quantize_activations",
    "quantize_blocks",
    "round_activations",
]


def block_scaled_matmul(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    *,
    quantize_activations: bool,
    implementation: str | None = None,
) -> jax.Array:
    """x @ W^T for a weight W = values * scales, accumulated in at least float32.

    x: [..., in]; values: [out, in] float8_e4m3fn; scales: [ceil(out / 128), ceil(in / 128)] float32.
    quantize_activations: round x to float8 per token and 128 channels first. Returns [..., out] in x.dtype.
    """
    check_scales(values, scales)
    if x.shape[-1] != values.shape[-1]:
        raise ValueError(f"x of {x.shape[-1]} channels does not fit a weight of {values.shape[-1]} inputs")
    flat = x.reshape(-1, x.shape[-1])
    chosen = resolve(implementation, supported=supports(flat, values))
    if chosen == "xla":
        return block_scaled_matmul_reference(x, values, scales, quantize_activations=quantize_activations)
    out = block_scaled_matmul_triton(
        flat, values, scales, quantized=quantize_activations, interpret=chosen == "interpret"
    )
    return out.reshape(*x.shape[:-1], values.shape[0])


def block_scaled_matmul_reference(
    x: jax.Array, values: jax.Array, scales: jax.Array, *, quantize_activations: bool
) -> jax.Array:
    """`block_scaled_matmul` in plain XLA. In float32 the same bits as a plain weight of the same values."""
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    wide = round_activations(x) if quantize_activations else x.astype(accumulate)
    w = dequantize_blocks(values, scales, accumulate)
    return jnp.matmul(wide, w.T, precision=jax.lax.Precision.HIGHEST).astype(x.dtype)
