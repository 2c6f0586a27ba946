"""Sparse MLA at the released model's shapes: 64 heads on one GPU, 8 a rank under TP8, both latents."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.sparse_mla import sparse_mla
from tests.amd.gate import Case

DIM, LAYERS, ROWS, WIDTH = 512, 12, 65_536, 2051


def struct(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def attention(tokens: int, heads: int, float8: bool) -> Case:
    arguments = (
        struct((tokens, heads, DIM), jnp.bfloat16),
        struct((LAYERS, ROWS, DIM), jnp.float8_e4m3fn if float8 else jnp.bfloat16),
        struct((tokens, WIDTH), jnp.int32),
        struct((), jnp.int32),
    ) + ((struct((LAYERS, ROWS, DIM // 128)),) if float8 else ())

    def function(q, latents, indices, layer, scales=None):
        return sparse_mla(
            q, latents, indices, scale=1 / 16, layer=layer, latent_scales=scales, implementation="triton"
        )

    name = f"sparse MLA{' fp8' if float8 else ''}, {tokens} tokens x {heads} heads"
    return Case(name, function, arguments, dots=("sparse_mla",))


def cases() -> list[Case]:
    shapes = ((2048, 64), (32, 64), (1, 64), (8192, 8), (32, 8))
    return [attention(*shape, float8) for shape in shapes for float8 in (False, True)]
