"""Block-scaled fp8 weights as a pytree leaf type, and the one matmul that hides them.

The stored layout is the released checkpoint's: float8_e4m3fn values with one float32 scale for each block of
128 x 128, `w[i, j] = values[i, j] * scales[i // 128, j // 128]` (MODEL.md b.8).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.block_scaled import block_scaled_matmul, dequantize_blocks, quantize_blocks
from pallas_kernels.dispatch import resolve


@struct.dataclass
class BlockScaled:
    """A weight `[..., out, in]` in float8_e4m3fn with float32 scales `[..., ceil(out/128), ceil(in/128)]`.

    Leading axes stack independent matrices; indexing them keeps values and scales together.
    """

    values: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    def __getitem__(self, index: Any) -> "BlockScaled":
        """Selects matrices of a stack: `index` may only reach the leading axes."""
        return BlockScaled(self.values[index], self.scales[index])


Weight = jax.Array | BlockScaled


def dequantize(weight: Weight, dtype: Any) -> jax.Array:
    """The weight as a plain array in `dtype`; the product is taken in at least float32, then rounded once."""
    if isinstance(weight, BlockScaled):
        return dequantize_blocks(weight.values, weight.scales, dtype)
    return weight.astype(dtype)


def quantize(weight: jax.Array) -> BlockScaled:
    """Rounds a weight `[..., out, in]` to fp8 blocks, each scaled so that its largest magnitude is kept."""
    return BlockScaled(*quantize_blocks(weight))


def matmul(
    x: jax.Array,
    w: Weight,
    *,
    implementation: str | None = None,
    quantize_activations: bool | None = None,
) -> jax.Array:
    """`x @ w^T`, contracting the last axes, in the dtype of `x`.

    Args:
        x: `[..., in]`.
        w: `[out, in]`, a plain array (cast to x's dtype) or `BlockScaled`.
        implementation: as in `pallas_kernels`; it concerns `BlockScaled` weights only.
        quantize_activations: with a `BlockScaled` weight, also round x to fp8 for each token and 128
            channels; None does so where the Triton kernel is chosen.

    Returns:
        `[..., out]` in x's dtype, accumulated in at least float32.
    """
    if isinstance(w, BlockScaled):
        resolved = resolve(implementation)
        rounded = resolved == "triton" if quantize_activations is None else quantize_activations
        if rounded or resolved != "xla":
            return block_scaled_matmul(
                x, w.values, w.scales, quantize_activations=rounded, implementation=implementation
            )
    wide = jnp.promote_types(x.dtype, jnp.float32)
    plain = dequantize(w, x.dtype)
    if isinstance(w, BlockScaled):
        # fused into the product, the dequantisation changes its order of sums: not the plain weight's bits
        plain = jax.lax.optimization_barrier(plain)
    product = jax.lax.dot_general(
        x,
        plain,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == wide else None,
        preferred_element_type=wide,
    )
    return product.astype(x.dtype)
