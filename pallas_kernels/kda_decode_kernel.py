"""KDA decode on Pallas-Triton: replay, publish and run one window in one pass over a row's state.

A program owns one head of a row and walks its value columns tile by tile, each [K, columns] in registers
with the next one already on its way. The state is read and written once whatever the window. As the program
is the only reader of its records, it overwrites them itself once it has read them.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import triton
from pallas_kernels.triton import Launch


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Tile and launch parameters of the decode kernel on one platform."""

    columns: int = 32
    splits: int = 1  # programs that share a head; more than one needs a second kernel for the records
    num_warps: int = 4


CUDA = DecodeConfig()
ROCM = DecodeConfig(num_warps=2)


def supported(q: jax.Array, v: jax.Array, state: jax.Array) -> bool:
    """Whether the kernel takes these shapes and dtypes: head dimensions a power of two, a float32 state."""
    dims = (q.shape[-1], v.shape[-1])
    return state.dtype == jnp.float32 and all(dim >= 16 and dim & (dim - 1) == 0 for dim in dims)


def _advance(state, k, v, log_decay, beta):
    """The state [K, columns] after one token, and nothing rounded on the way."""
    k = k.astype(jnp.float32)
    state = state * jnp.exp(log_decay.astype(jnp.float32))[:, None]
    known = jnp.sum(state * k[:, None], axis=0)
    return state + k[:, None] * (beta.astype(jnp.float32) * (v.astype(jnp.float32) - known))[None, :]


def _write_records(input_refs, record_refs, layer, record, row, head, window):
    @pl.loop(0, window)
    def _(step):
        for ref, kept in zip(input_refs, record_refs, strict=True):
            kept[layer, record, step, head] = ref[row, step, head].astype(kept.dtype)


def _kernel(
    layer_ref, slot_ref, record_slot_ref, accepted_ref, publish_after_ref, publish_slot_ref,
    q_ref, k_ref, v_ref, decay_ref, beta_ref, *refs, columns, tiles, barrier,
):  # fmt: skip
    # The stacked arrays are aliased to outputs; only the output references are used.
    out_ref, state_ref, *record_refs = refs[len(refs) - 6 :]
    row, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    layer, slot = layer_ref[0], slot_ref[row]
    window = q_ref.shape[1]

    def tile_columns(tile):
        return pl.ds((split * tiles + tile) * columns, columns)

    @pl.when(slot >= 0)
    def _():
        record, accepted = record_slot_ref[row], accepted_ref[row]
        publish_after, publish_slot = publish_after_ref[row], publish_slot_ref[row]
        kept_k, kept_v, kept_decay, kept_beta = record_refs

        def recorded(step, span):
            at = (layer, record, jnp.minimum(step, window - 1), head)
            return kept_k[at], kept_v[(*at, span)], kept_decay[at], kept_beta[at]

        def incoming(step, span):
            # Rounded as the records will hold it: running a token and replaying it are one computation.
            at = (row, jnp.minimum(step, window - 1), head)
            token = k_ref[at], v_ref[(*at, span)], decay_ref[at], beta_ref[at]
            return tuple(x.astype(kept.dtype) for x, kept in zip(token, record_refs, strict=True)), q_ref[at]

        def walk(tile, state):
            span = tile_columns(tile)
            following = state_ref[layer, slot, head, :, tile_columns(jnp.minimum(tile + 1, tiles - 1))]

            # Each token is loaded one step before its use.
            def replay(step, carry):
                state, token = carry
                ahead = recorded(step + 1, span)
                state = _advance(state, *token)

                @pl.when((step + 1 == publish_after) & (publish_slot >= 0))
                def _():
                    state_ref[layer, publish_slot, head, :, span] = state

                return state, ahead

            def run(step, carry):
                state, (token, q) = carry
                ahead = incoming(step + 1, span)
                state = _advance(state, *token)
                out = jnp.sum(state * q.astype(jnp.float32)[:, None], axis=0)
                out_ref[row, step, head, span] = out.astype(out_ref.dtype)
                return state, ahead

            first = incoming(0, span)
            state, _ = lax.fori_loop(0, accepted, replay, (state, recorded(0, span)))

            @pl.when(accepted > 0)
            def _():
                state_ref[layer, slot, head, :, span] = state

            lax.fori_loop(0, window, run, (state, first))
            return following

        lax.fori_loop(0, tiles, walk, state_ref[layer, slot, head, :, tile_columns(0)])
        if barrier is not None:
            barrier()  # every thread has read the old records before any thread overwrites them
            _write_records((k_ref, v_ref, decay_ref, beta_ref), record_refs, layer, record, row, head, window)

    @pl.when(slot < 0)
    def _():
        @pl.loop(0, window)
        def _(step):
            for tile in range(tiles):
                out_ref[row, step, head, tile_columns(tile)] = jnp.zeros(columns, out_ref.dtype)


def _record_kernel(layer_ref, slot_ref, record_slot_ref, k_ref, v_ref, decay_ref, beta_ref, *refs):
    row, head = pl.program_id(0), pl.program_id(1)

    @pl.when(slot_ref[row] >= 0)
    def _():
        inputs, kept = (k_ref, v_ref, decay_ref, beta_ref), refs[len(refs) - 4 :]
        _write_records(inputs, kept, layer_ref[0], record_slot_ref[row], row, head, k_ref.shape[1])


def decode(
    q, k, v, log_decay, beta, state, layer, slots, records, record_slots, accepted,
    publish_after, publish_slots, *, config, interpret=False,
):  # fmt: skip
    """The kernel's `kda.kda_decode`; records are a tuple (k, v, log_decay, beta)."""
    rows, _, heads = beta.shape
    columns = min(config.columns, v.shape[-1] // config.splits)
    launch = Launch(config.num_warps, num_stages=1)
    unused = jnp.full(rows, -1, jnp.int32)
    marks = (unused, unused) if publish_after is None else (publish_after, publish_slots)
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    arguments = [layer, slots, record_slots, accepted, *marks, q, k, v, log_decay, beta, state, *records]

    def shapes(*arrays):
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]

    in_kernel = config.splits == 1
    barrier = (lambda: None) if interpret else triton.barrier
    out, state, *records = triton.pallas_call(
        functools.partial(
            _kernel,
            columns=columns,
            tiles=v.shape[-1] // (columns * config.splits),
            barrier=barrier if in_kernel else None,
        ),
        out_shape=shapes(v, state, *records),
        grid=(rows, heads, config.splits),
        cuda=launch,
        rocm=launch,
        input_output_aliases={len(arguments) - 5 + i: 1 + i for i in range(5)},
        interpret=interpret,
        name="kda_decode",
    )(*arguments)
    if not in_kernel:
        records = triton.pallas_call(
            _record_kernel,
            out_shape=shapes(*records),
            grid=(rows, heads),
            cuda=Launch(1, 1),
            rocm=Launch(1, 1),
            input_output_aliases={7 + i: i for i in range(4)},
            interpret=interpret,
            name="kda_decode_records",
        )(layer, slots, record_slots, k, v, log_decay, beta, *records)
    return out, state, tuple(records)
