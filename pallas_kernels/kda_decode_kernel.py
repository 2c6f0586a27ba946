"""KDA decode on Pallas-Triton: replay, publish and run one window of a row's head in one pass over its state.

One program owns a whole [K, V] state, so it is the only reader and writer of its records and its slot, and
the pool is updated in place. The state is read and written once whatever the window.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton
from pallas_kernels.triton import Launch

CUDA = Launch(num_warps=8, num_stages=1)
ROCM = Launch(num_warps=4, num_stages=1)


def supported(q: jax.Array, v: jax.Array, state: jax.Array) -> bool:
    """Whether the kernel takes these shapes and dtypes: head dimensions a power of two, a float32 state."""
    dims = (q.shape[-1], v.shape[-1])
    return state.dtype == jnp.float32 and all(dim >= 16 and dim & (dim - 1) == 0 for dim in dims)


def _kernel(
    layer_ref, slot_ref, record_slot_ref, accepted_ref, publish_after_ref, publish_slot_ref,
    q_ref, k_ref, v_ref, decay_ref, beta_ref, *refs, window, barrier,
):  # fmt: skip
    # The stacked arrays are aliased to outputs: the output references are read and written, the inputs unused.
    out_ref, state_ref, *record_refs = refs[len(refs) - 6 :]
    row, head = pl.program_id(0), pl.program_id(1)
    layer, slot = layer_ref[0], slot_ref[row]

    def advance(state, k, v, log_decay, beta):
        k = k.astype(jnp.float32)
        state = state * jnp.exp(log_decay.astype(jnp.float32))[:, None]
        known = jnp.sum(state * k[:, None], axis=0)
        return state + k[:, None] * (beta.astype(jnp.float32) * (v.astype(jnp.float32) - known))[None, :]

    @pl.when(slot >= 0)
    def _():
        record = record_slot_ref[row]
        accepted = accepted_ref[row]

        def replay(step, state):
            state = advance(state, *(ref[layer, record, step, head] for ref in record_refs))

            @pl.when((step + 1 == publish_after_ref[row]) & (publish_slot_ref[row] >= 0))
            def _():
                state_ref[layer, publish_slot_ref[row], head] = state

            return state

        state = jax.lax.fori_loop(0, accepted, replay, state_ref[layer, slot, head])

        @pl.when(accepted > 0)
        def _():
            state_ref[layer, slot, head] = state

        inputs = (k_ref, v_ref, decay_ref, beta_ref)
        for step in range(window):
            # Rounded as the records will hold it: running a token and replaying it are one computation.
            token = [
                ref[row, step, head].astype(kept.dtype) for ref, kept in zip(inputs, record_refs, strict=True)
            ]
            state = advance(state, *token)
            out = jnp.sum(state * q_ref[row, step, head].astype(jnp.float32)[:, None], axis=0)
            out_ref[row, step, head] = out.astype(out_ref.dtype)
        # Every thread has read the old records before any thread overwrites them.
        barrier()
        for step in range(window):
            for ref, kept in zip(inputs, record_refs, strict=True):
                kept[layer, record, step, head] = ref[row, step, head].astype(kept.dtype)

    @pl.when(slot < 0)
    def _():
        for step in range(window):
            out_ref[row, step, head] = jnp.zeros(out_ref.shape[-1:], out_ref.dtype)


def decode(
    q, k, v, log_decay, beta, state, layer, slots, records, record_slots, accepted, publish_after, publish_slots,
    *, cuda=CUDA, rocm=ROCM, interpret=False,
):  # fmt: skip
    """The kernel's `kda.kda_decode`; records are a tuple (k, v, log_decay, beta)."""
    rows, window, heads = beta.shape
    unused = jnp.full(rows, -1, jnp.int32)
    scalars = [
        jnp.asarray(layer, jnp.int32).reshape(1),
        slots,
        record_slots,
        accepted,
        unused if publish_after is None else publish_after,
        unused if publish_slots is None else publish_slots,
    ]
    inputs = [q, k, v, log_decay, beta]
    first = len(scalars) + len(inputs)
    out, state, *records = triton.pallas_call(
        functools.partial(_kernel, window=window, barrier=(lambda: None) if interpret else triton.barrier),
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (state, *records)),
        ],
        grid=(rows, heads),
        cuda=cuda,
        rocm=rocm,
        input_output_aliases={first + i: 1 + i for i in range(5)},
        interpret=interpret,
        name="kda_decode",
    )(*scalars, *inputs, state, *records)
    return out, state, tuple(records)
