"""The short convolution's decode window on Pallas-Triton: history, convolution and state in one pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton
from pallas_kernels.triton import Launch

CUDA = Launch(num_warps=4, num_stages=1)
ROCM = Launch(num_warps=2, num_stages=1)
LANES = 512  # channels of one program, at most


def supported(channels: int) -> bool:
    """Whether the kernel takes so many channels: it cuts them into blocks of a power of two."""
    return channels % 64 == 0


def _kernel(
    layer_ref: Any,
    slot_ref: Any,
    accepted_ref: Any,
    publish_after_ref: Any,
    publish_slot_ref: Any,
    x_ref: Any,
    weight_ref: Any,
    _: Any,
    y_ref: Any,
    state_ref: Any,
    *,
    lanes: int,
    barrier: Callable[[], None],
) -> None:
    row, block = pl.program_id(0), pl.program_id(1)
    window, taps = x_ref.shape[1], weight_ref.shape[1]
    layer, slot = layer_ref[0], slot_ref[row]
    channels = pl.ds(block * lanes, lanes)

    @pl.when(slot >= 0)
    def run() -> None:
        accepted, published = accepted_ref[row], publish_slot_ref[row]
        after = jnp.maximum(publish_after_ref[row], 0)
        history = [state_ref[layer, slot, accepted + i, channels] for i in range(taps - 1)]
        marked = [state_ref[layer, slot, after + i, channels] for i in range(taps - 1)]
        entries = history + [x_ref[row, i, channels].astype(state_ref.dtype) for i in range(window)]
        weights = [weight_ref[channels, j].astype(jnp.float32) for j in range(taps)]
        for i in range(window):
            total = sum(weights[j] * entries[i + j].astype(jnp.float32) for j in range(taps))
            y_ref[row, i, channels] = (total * jax.nn.sigmoid(total)).astype(y_ref.dtype)
        barrier()  # every thread has read the old entries before any thread overwrites them
        for i, entry in enumerate(entries):
            state_ref[layer, slot, i, channels] = entry

        @pl.when((published >= 0) & (after > 0) & (after <= accepted))
        def publish() -> None:
            for i, entry in enumerate(marked):
                state_ref[layer, published, i, channels] = entry
            for i in range(window):
                state_ref[layer, published, taps - 1 + i, channels] = jnp.zeros(lanes, state_ref.dtype)

    @pl.when(slot < 0)
    def pad() -> None:
        for i in range(window):
            y_ref[row, i, channels] = jnp.zeros(lanes, y_ref.dtype)


def decode(
    x: jax.Array,
    weight: jax.Array,
    state: jax.Array,
    layer: int | jax.Array,
    slots: jax.Array,
    accepted: jax.Array,
    publish_after: jax.Array,
    publish_slots: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The kernel's `short_convolution.short_convolution_decode`; -1 publishes nothing."""
    rows, _, channels = x.shape
    lanes = min(LANES, channels & -channels)
    arguments = [jnp.asarray(layer, jnp.int32).reshape(1), slots, accepted, publish_after, publish_slots]
    y, state = triton.pallas_call(
        functools.partial(_kernel, lanes=lanes, barrier=(lambda: None) if interpret else triton.barrier),
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, state)],
        grid=(rows, channels // lanes),
        cuda=CUDA,
        rocm=ROCM,
        input_output_aliases={len(arguments) + 2: 1},
        interpret=interpret,
        name="short_convolution_decode",
    )(*arguments, x, weight, state)
    return y, state
