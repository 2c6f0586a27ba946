"""The short convolution's decode kernel: q, k and v of 64 heads on one GPU, of 8 heads a rank under TP8."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.short_convolution import short_convolution_decode
from tests.amd.gate import Case

LAYERS, SLOTS, TAPS = 34, 64, 4


def decode(rows: int, window: int, heads: int) -> Case:
    channels = 3 * heads * 128
    ids = jax.ShapeDtypeStruct((rows,), jnp.int32)
    arguments = (
        jax.ShapeDtypeStruct((rows, window, channels), jnp.bfloat16),
        jax.ShapeDtypeStruct((channels, TAPS), jnp.bfloat16),
        jax.ShapeDtypeStruct((LAYERS, SLOTS, TAPS - 1 + window, channels), jnp.bfloat16),
        jax.ShapeDtypeStruct((), jnp.int32),
        *(ids,) * 4,
    )

    def function(*args):
        *args, after, slots = args
        marks = {"publish_after": after, "publish_slots": slots}
        return short_convolution_decode(*args, **marks, implementation="triton")

    return Case(f"short convolution, decode {rows} x {heads} heads, window {window}", function, arguments)


def cases() -> list[Case]:
    return [decode(32, 1, 64), decode(32, 4, 64), decode(32, 4, 8)]
