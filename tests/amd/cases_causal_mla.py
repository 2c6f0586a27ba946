"""Causal and pool-masked MLA of a prompt at the released model's shapes, with 8 heads a rank and with 64."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.causal_mla import causal_mla
from tests.amd.gate import Case

DIM, LAYERS, ROWS, BLOCK, KPOOL = 512, 12, 65_536, 64, 4


def struct(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def attention(tokens: int, heads: int, masked: bool, float8: bool) -> Case:
    ids = struct((tokens,), jnp.int32)
    inputs = {
        "q": struct((tokens, heads, DIM), jnp.bfloat16),
        "latents": struct((LAYERS, ROWS, DIM), jnp.float8_e4m3fn if float8 else jnp.bfloat16),
        "block_tables": struct((4, tokens // BLOCK), jnp.int32),
        "row_of_token": ids,
        "positions": ids,
        "layer": struct((), jnp.int32),
    }
    if float8:
        inputs["latent_scales"] = struct((LAYERS, ROWS, DIM // 128))
    if masked:
        inputs["chosen"] = struct((tokens, tokens // KPOOL // 32), jnp.int32)

    def function(inputs):
        return causal_mla(**inputs, block_size=BLOCK, scale=1 / 16, kpool=KPOOL, implementation="triton")

    kind = f"{' masked' if masked else ''}{' fp8' if float8 else ''}"
    return Case(f"causal MLA{kind}, {tokens} x {heads} heads", function, (inputs,), dots=("causal_mla",))


def cases() -> list[Case]:
    return [
        attention(tokens, heads, masked, float8)
        for tokens, heads, masked in ((8192, 8, True), (2048, 8, False), (2048, 64, False))
        for float8 in (False, True)
    ]
