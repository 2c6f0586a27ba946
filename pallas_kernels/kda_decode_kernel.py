"""KDA decode on Pallas-Triton: replay, publish and run one window in one pass over a row's state.

A program owns one head of a row and walks its value columns tile by tile, each [K, columns] in registers
with the next one already on its way. The state is read and written once whatever the window. A program that
has a head to itself is the only reader of its records and overwrites them once it has read them; where
several share a head, a second kernel does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

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


def cuda_config(rows: int, heads: int, value_dim: int) -> DecodeConfig:
    """NVIDIA's configuration: four programs a head where many heads keep the device filled throughout.

    For 32 rows of 64 heads on an H200 a window of 1 token takes 103 us with four programs a head, the second
    kernel included, and 112 with one; a window of 4 tokens that replays 4 takes 193 with four.
    """
    return DecodeConfig(splits=4) if rows * heads >= 1024 and value_dim >= 128 else CUDA


def supported(q: jax.Array, v: jax.Array, state: jax.Array) -> bool:
    """Whether the kernel takes these shapes and dtypes: head dimensions a power of two, a float32 state."""
    dims = (q.shape[-1], v.shape[-1])
    return state.dtype == jnp.float32 and all(dim >= 16 and dim & (dim - 1) == 0 for dim in dims)


def _advance(
    state: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array
) -> jax.Array:
    """The state [K, columns] after one token, and nothing rounded on the way."""
    k = k.astype(jnp.float32)
    state = state * jnp.exp(log_decay.astype(jnp.float32))[:, None]
    known = jnp.sum(state * k[:, None], axis=0)
    return state + k[:, None] * (beta.astype(jnp.float32) * (v.astype(jnp.float32) - known))[None, :]


def _write_records(
    input_refs: Sequence[Any], record_refs: Sequence[Any], at: tuple[jax.Array, ...], window: int
) -> None:
    layer, record, row, head = at

    @pl.loop(0, window)
    def write(step: jax.Array) -> None:
        for ref, kept in zip(input_refs, record_refs, strict=True):
            kept[layer, record, step, head] = ref[row, step, head].astype(kept.dtype)


def _kernel(
    layer_ref: Any,
    slot_ref: Any,
    record_slot_ref: Any,
    accepted_ref: Any,
    publish_after_ref: Any,
    publish_slot_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    decay_ref: Any,
    beta_ref: Any,
    *refs: Any,
    columns: int,
    tiles: int,
    barrier: Callable[[], None] | None,
) -> None:
    # The stacked arrays are aliased to outputs; only the output references are used.
    out_ref, state_ref, *record_refs = refs[len(refs) - 6 :]
    row, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    layer, slot = layer_ref[0], slot_ref[row]
    window = q_ref.shape[1]

    def tile_columns(tile: int | jax.Array) -> Any:
        return pl.ds((split * tiles + tile) * columns, columns)

    @pl.when(slot >= 0)
    def run_row() -> None:
        record, accepted = record_slot_ref[row], accepted_ref[row]
        publish_after, publish_slot = publish_after_ref[row], publish_slot_ref[row]
        kept_k, kept_v, kept_decay, kept_beta = record_refs

        def recorded(step: int | jax.Array, span: Any) -> tuple[jax.Array, ...]:
            at = (layer, record, jnp.minimum(step, window - 1), head)
            return kept_k[at], kept_v[(*at, span)], kept_decay[at], kept_beta[at]

        def incoming(step: int | jax.Array, span: Any) -> tuple[tuple[jax.Array, ...], jax.Array]:
            # Rounded as the records will hold it: running a token and replaying it are one computation.
            at = (row, jnp.minimum(step, window - 1), head)
            token = k_ref[at], v_ref[(*at, span)], decay_ref[at], beta_ref[at]
            return tuple(x.astype(kept.dtype) for x, kept in zip(token, record_refs, strict=True)), q_ref[at]

        def walk(tile: jax.Array, state: jax.Array) -> jax.Array:
            span = tile_columns(tile)
            following = state_ref[layer, slot, head, :, tile_columns(jnp.minimum(tile + 1, tiles - 1))]

            # Each token is loaded one step before its use.
            def replay(step: jax.Array, carry: Any) -> Any:
                state, token = carry
                ahead = recorded(step + 1, span)
                state = _advance(state, *token)

                @pl.when((step + 1 == publish_after) & (publish_slot >= 0))
                def publish() -> None:
                    state_ref[layer, publish_slot, head, :, span] = state

                return state, ahead

            def run(step: jax.Array, carry: Any) -> Any:
                state, (token, q) = carry
                ahead = incoming(step + 1, span)
                state = _advance(state, *token)
                out = jnp.sum(state * q.astype(jnp.float32)[:, None], axis=0)
                out_ref[row, step, head, span] = out.astype(out_ref.dtype)
                return state, ahead

            first = incoming(0, span)
            state, _ = lax.fori_loop(0, accepted, replay, (state, recorded(0, span)))

            @pl.when(accepted > 0)
            def commit() -> None:
                state_ref[layer, slot, head, :, span] = state

            lax.fori_loop(0, window, run, (state, first))
            return following

        lax.fori_loop(0, tiles, walk, state_ref[layer, slot, head, :, tile_columns(0)])
        if barrier is not None:
            barrier()  # every thread has read the old records before any thread overwrites them
            at = (layer, record, row, head)
            _write_records((k_ref, v_ref, decay_ref, beta_ref), record_refs, at, window)

    @pl.when(slot < 0)
    def pad() -> None:
        @pl.loop(0, window)
        def zero(step: jax.Array) -> None:
            for tile in range(tiles):
                out_ref[row, step, head, tile_columns(tile)] = jnp.zeros(columns, out_ref.dtype)


def _record_kernel(layer_ref: Any, slot_ref: Any, record_slot_ref: Any, *refs: Any) -> None:
    row, head = pl.program_id(0), pl.program_id(1)

    @pl.when(slot_ref[row] >= 0)
    def write() -> None:
        at = (layer_ref[0], record_slot_ref[row], row, head)
        _write_records(refs[:4], refs[len(refs) - 4 :], at, refs[0].shape[1])


def decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    layer: int | jax.Array,
    slots: jax.Array,
    records: Sequence[jax.Array],
    record_slots: jax.Array,
    accepted: jax.Array,
    publish_after: jax.Array | None,
    publish_slots: jax.Array | None,
    *,
    config: DecodeConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """The kernel's `kda.kda_decode`; records are a tuple (k, v, log_decay, beta)."""
    rows, _, heads = beta.shape
    columns = min(config.columns, v.shape[-1] // config.splits)
    launch = Launch(config.num_warps, num_stages=1)
    unused = jnp.full(rows, -1, jnp.int32)
    marks = (unused, unused) if publish_after is None else (publish_after, publish_slots)
    first = jnp.asarray(layer, jnp.int32).reshape(1)
    arguments = [first, slots, record_slots, accepted, *marks, q, k, v, log_decay, beta, state, *records]

    def shapes(*arrays: jax.Array) -> list[jax.ShapeDtypeStruct]:
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
        )(first, slots, record_slots, k, v, log_decay, beta, *records)
    return out, state, tuple(records)
