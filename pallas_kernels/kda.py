"""Kimi delta attention (KDA): prefill, chunk and recurrent forms, and the decode/verify window.

All forms take keys and queries that are already l2-normalised, with the query scaled by K**-0.5.
`kda_reference` has the mathematics; the Pallas-Triton kernels live in `kda_prefill_kernel` and
`kda_decode_kernel`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels import kda_decode_kernel, kda_decode_reference, kda_prefill_kernel, kda_reference, triton
from pallas_kernels.dispatch import resolve


@flax.struct.dataclass
class KdaRecords:
    """The last window's inputs, stacked [layers, request_slots, W, H, ...]: what a replay needs."""

    k: jax.Array  # [..., K]
    v: jax.Array  # [..., V]
    log_decay: jax.Array  # [..., K], at least float32
    beta: jax.Array  # [layers, request_slots, W, H], at least float32


def kda_recurrent(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, initial_state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Token-by-token recurrence: the definition every other form is compared with.

    Args:
      q, k, log_decay: [batch, time, H, K]; log_decay is the natural logarithm of the decay, at most 0.
      v: [batch, time, H, V].
      beta: [batch, time, H].
      initial_state: [batch, H, K, V].

    Returns:
      out [batch, time, H, V] in v's dtype and the final state [batch, H, K, V], at least float32.
    """
    return kda_reference.recurrent(q, k, v, log_decay, beta, initial_state)


def kda_chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    *,
    lengths: jax.Array | None = None,
    chunk: int = 16,
    gate_lower_bound: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Chunk form over a rectangular batch; shapes and results as in `kda_recurrent`.

    `lengths` [batch] int32 counts the valid tokens of a row: later ones neither touch the state nor matter,
    and their outputs are finite. The XLA form is differentiable and safe for any gate. The Triton kernel is
    chosen only when `gate_lower_bound` promises log_decay >= -5: its 16-token chunks then fit float32.
    """
    chosen = resolve(implementation, supported=kda_prefill_kernel.supported(q, v, gate_lower_bound))
    if chosen == "xla":
        return kda_reference.chunked(q, k, v, log_decay, beta, initial_state, lengths, chunk)
    batch, time = beta.shape[:2]
    if lengths is not None:
        # The padding of every row but the last lies between rows: it becomes tokens that change nothing.
        valid = (jnp.arange(time) < lengths[:, None])[..., None]
        k, v, log_decay = (jnp.where(valid[..., None], x, 0) for x in (k, v, log_decay))
        q, beta = jnp.where(valid[..., None], q, 0), jnp.where(valid, beta, 0)
    flat = [x.reshape(batch * time, *x.shape[2:]) for x in (q, k, v, log_decay, beta)]
    cu_seqlens = jnp.arange(batch + 1, dtype=jnp.int32) * time
    unmarked = jnp.full((batch, 0), -1, jnp.int32)
    out, states, _ = _prefill_kernel((*flat, initial_state, cu_seqlens, unmarked), chosen)
    return out.reshape(v.shape), states


def kda_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    cu_seqlens: jax.Array,
    *,
    checkpoints: jax.Array | None = None,
    chunk: int = 16,
    gate_lower_bound: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Chunk form over a ragged batch flattened to one token axis.

    Args:
      q, k, log_decay: [T, H, K]; v: [T, H, V]; beta: [T, H].
      initial_state: [R, H, K, V].
      cu_seqlens: [R + 1] int32, cumulative row lengths; rows may be empty. Tokens past cu_seqlens[-1] are
        padding: their outputs are finite and they change nothing.
      checkpoints: [R, M] int32, token counts inside a row (1..length) after which the state is wanted; -1
        for none, whose states are zeros.
      gate_lower_bound: promise that log_decay >= this bound; the Triton kernel needs one of at least -5.

    Returns:
      out [T, H, V] in v's dtype, final states [R, H, K, V] and, with checkpoints, their states
      [R, M, H, K, V]; states are at least float32. The chunk grid of a row starts at the row's first token,
      so outputs are bit-equal when later tokens change.
    """
    chosen = resolve(implementation, supported=kda_prefill_kernel.supported(q, v, gate_lower_bound))
    cu_seqlens = jnp.asarray(cu_seqlens)
    marks = jnp.full((initial_state.shape[0], 0), -1) if checkpoints is None else jnp.asarray(checkpoints)
    arguments = (q, k, v, log_decay, beta, initial_state, cu_seqlens, marks)
    if chosen == "xla":
        out, states, snapshots = kda_reference.prefill(*arguments, chunk)
    else:
        out, states, snapshots = _prefill_kernel(arguments, chosen)
    return (out, states) if checkpoints is None else (out, states, snapshots)


def _prefill_kernel(arguments: tuple[jax.Array, ...], chosen: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The prefill kernel on kda_prefill's positional arguments and checkpoints."""
    (tokens, heads), rows = arguments[4].shape, arguments[5].shape[0]
    cuda, rocm = (
        kda_prefill_kernel.choose(config, tokens, rows, heads)
        for config in (kda_prefill_kernel.CUDA, kda_prefill_kernel.ROCM)
    )
    return _run_kernel(kda_prefill_kernel.prefill, arguments, chosen, cuda=cuda, rocm=rocm)


def _run_kernel(
    kernel: Callable[..., Any], arguments: tuple[Any, ...], chosen: str, *, cuda: Any, rocm: Any
) -> Any:
    """Call a kernel with the configuration of the platform; the interpreter takes CUDA's."""
    if chosen == "interpret":
        return kernel(*arguments, config=cuda, interpret=True)
    leaves, structure = jax.tree.flatten(arguments)

    def run(config: Any, *operands: jax.Array) -> Any:
        return kernel(*jax.tree.unflatten(structure, operands), config=config)

    return triton.per_platform(run, *leaves, cuda=cuda, rocm=rocm)


def kda_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    layer: int | jax.Array,
    slots: jax.Array,
    records: KdaRecords,
    record_slots: jax.Array,
    accepted: jax.Array,
    *,
    publish_after: jax.Array | None = None,
    publish_slots: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, KdaRecords]:
    """Decode or verify a window of W tokens a row, after replaying the accepted part of the last window.

    Args:
      q, k, log_decay: [R, W, H, K]; v: [R, W, H, V]; beta: [R, W, H].
      state: [layers, slots, H, K, V], at least float32: the committed states, updated in place if donated.
      layer: index into the stacked arrays.
      slots: [R] int32 state slot of a row, all different; -1 is a padding row, which touches nothing.
      records: the previous window of every request, [layers, request_slots, W, H, ...].
      record_slots: [R] int32 request slot of a row.
      accepted: [R] int32 in 0..W, recorded tokens to commit before this window runs.
      publish_after, publish_slots: [R] int32; the state after that many replayed tokens (1..accepted, -1 for
        none) is also written to this state slot (-1 for none).

    Returns:
      out [R, W, H, V] in v's dtype (zeros for padding rows), the state with the replayed tokens committed,
      and the records holding this window, whose own tokens are not committed. A token is rounded to the
      records' dtypes before it is used, so running it in a window and replaying it later are one computation.
    """
    if records.k.shape[2] != k.shape[1]:
        raise ValueError(
            f"the records hold windows of {records.k.shape[2]} tokens, this window has {k.shape[1]}"
        )
    if (publish_after is None) != (publish_slots is None):
        raise ValueError("publish_after and publish_slots go together")
    stacked: tuple[jax.Array, ...] = (records.k, records.v, records.log_decay, records.beta)
    inputs = (q, k, v, log_decay, beta)
    marks = (publish_after, publish_slots)
    arguments = (*inputs, state, layer, slots, stacked, record_slots, accepted, *marks)
    chosen = resolve(implementation, supported=kda_decode_kernel.supported(q, v, state))
    if chosen == "xla":
        out, state, stacked = kda_decode_reference.decode(*arguments)
    else:
        rows, _, heads, value_dim = v.shape
        cuda, rocm = kda_decode_kernel.cuda_config(rows, heads, value_dim), kda_decode_kernel.ROCM
        out, state, stacked = _run_kernel(kda_decode_kernel.decode, arguments, chosen, cuda=cuda, rocm=rocm)
    return out, state, KdaRecords(*stacked)
