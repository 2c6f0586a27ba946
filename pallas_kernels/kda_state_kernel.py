"""KDA prefill's state kernels: serial over a row's chunks, parallel over rows, heads, columns and segments.

A program holds some columns of its state transposed, [columns, K], in registers: every product then has the
state or the update as its left operand, and no operand of the serial chain passes through shared memory.

The state's map over a segment of chunks is affine, S -> M S + b. With segments, one kernel finds every
segment's M and b at once, a short one joins them to each segment's initial state, and the state kernel then
runs all segments in parallel: the serial chain of a long row shortens by as much.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton
from pallas_kernels.kda_chunk_plan import SKIP, ZERO, ChunkPlan, sequence_plan
from pallas_kernels.triton import Launch

# The joining kernel holds a whole [K, K] map in registers, 64 a thread.
JOIN_CUDA, JOIN_ROCM = Launch(num_warps=8, num_stages=1), Launch(num_warps=4, num_stages=1)


def _advance(
    state: jax.Array,
    chunk: jax.Array,
    head: jax.Array,
    values: jax.Array,
    total: jax.Array,
    refs: Sequence[Any],
    dot: Callable[..., jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """One chunk of the transposed state [width, K]: (state after it, its output transposed [width, C]).

    `values` [width, C] is U transposed, `total` [K] the chunk's decay.
    """
    weights_ref, queries_ref, keys_ref, scores_ref = refs
    operand = weights_ref.dtype
    narrow = state.astype(operand)
    update = (values + dot(narrow, weights_ref[head, chunk], trans_b=True)).astype(operand)
    out = dot(narrow, queries_ref[head, chunk], trans_b=True) + dot(
        update, scores_ref[head, chunk], trans_b=True
    )
    return state * total[None, :] + dot(update, keys_ref[head, chunk]), out


def _state_kernel(
    bounds_ref: Any,
    target_ref: Any,
    final_ref: Any,
    start_ref: Any,
    length_ref: Any,
    initial_ref: Any,
    values_ref: Any,
    *refs: Any,
    size: int,
    width: int,
    marks: int,
    carried: bool,
    precision: str,
) -> None:
    """Some value columns of one head over the chunks of one sequence, with the state in registers."""
    *term_refs, total_ref, out_ref, states_ref, snapshots_ref = refs
    sequence, head, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    columns = pl.ds(block * width, width)
    dot = functools.partial(triton.dot, precision=precision)
    if carried:
        state = initial_ref[sequence, head, columns, :]
    else:
        state = initial_ref[sequence, head, :, columns].astype(jnp.float32).T

    def fetch(
        chunk: jax.Array,
    ) -> tuple[jax.Array, ...]:  # what a step needs outside its dots, loaded one step ahead of its use
        chunk = jnp.minimum(chunk, start_ref.shape[0] - 1)
        return total_ref[head, chunk], start_ref[chunk], length_ref[chunk]

    def step(chunk: jax.Array, carry: Any) -> Any:
        state, (total, start, length) = carry
        following = fetch(chunk + 1)
        values = values_ref[head, chunk, columns, :].astype(jnp.float32)
        state, out = _advance(state, chunk, head, values, total, term_refs, dot)
        rows = jnp.arange(size)
        tokens, channels = start + rows, block * width + jnp.arange(width)
        index = out_ref.at[tokens[:, None], head, channels[None, :]]
        triton.store(index, out.T.astype(out_ref.dtype), mask=rows[:, None] < length)
        return state, following

    def until_bound(bound: jax.Array, state: jax.Array) -> jax.Array:
        first, stop = bounds_ref[sequence, bound], bounds_ref[sequence, bound + 1]
        state, _ = jax.lax.fori_loop(first, stop, step, (state, fetch(first)))
        target, row = target_ref[sequence, bound], final_ref[sequence]

        @pl.when(target != SKIP)
        def write_snapshot() -> None:
            slot = jnp.where(target >= 0, target, ZERO - target)
            snapshots_ref[slot, head, :, columns] = jnp.where(target >= 0, state, 0.0).T

        @pl.when((bound == marks) & (row >= 0))
        def write_final() -> None:
            states_ref[row, head, :, columns] = state.T

        return state

    # One loop over bounds, the end included, so that the chunk loop is compiled once.
    jax.lax.fori_loop(0, marks + 1, until_bound, state)


def _segment_kernel(bounds_ref: Any, values_ref: Any, *refs: Any, width: int, precision: str) -> None:
    """The affine map of one segment: S_after = M S_before + b, as rows [b^T; M^T] of the output."""
    *term_refs, total_ref, maps_ref = refs
    sequence, head, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    value_dim, key_dim = values_ref.shape[2], maps_ref.shape[3]
    dot = functools.partial(triton.dot, precision=precision)
    row = block * width
    offset = row + jnp.arange(width) - value_dim  # row of M^T, negative in b^T
    state = jnp.where(offset[:, None] == jnp.arange(key_dim)[None, :], 1.0, 0.0)
    columns = pl.ds(jnp.where(row < value_dim, row, 0), width)

    def fetch(chunk: jax.Array) -> jax.Array:
        return total_ref[head, jnp.minimum(chunk, total_ref.shape[1] - 1)]

    def step(chunk: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        state, total = carry
        following = fetch(chunk + 1)
        values = values_ref[head, chunk, columns, :].astype(jnp.float32)
        values = jnp.where(row < value_dim, values, 0.0)
        return _advance(state, chunk, head, values, total, term_refs, dot)[0], following

    first, stop = bounds_ref[sequence, 0], bounds_ref[sequence, 1]
    state, _ = jax.lax.fori_loop(first, stop, step, (state, fetch(first)))
    maps_ref[sequence, head, pl.ds(row, width), :] = state


def _join_kernel(
    initial_ref: Any, maps_ref: Any, carried_ref: Any, *, width: int, segments: int, precision: str
) -> None:
    """Transposed states before each segment of a row, from its initial state and its segments' maps."""
    row, head, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    value_dim, key_dim = carried_ref.shape[2], carried_ref.shape[3]
    columns = pl.ds(block * width, width)

    def step(segment: jax.Array, state: jax.Array) -> jax.Array:
        sequence = row * segments + segment
        carried_ref[sequence, head, columns, :] = state
        transposed_map = maps_ref[sequence, head, pl.ds(value_dim, key_dim), :]
        return triton.dot(state, transposed_map, precision=precision) + maps_ref[sequence, head, columns, :]

    state = initial_ref[row, head, :, columns].astype(jnp.float32).T
    jax.lax.fori_loop(0, segments, step, state)


def scan_states(
    plan: ChunkPlan,
    initial_state: jax.Array,
    terms: Sequence[jax.Array],
    v: jax.Array,
    *,
    chunk: int,
    width: int,
    segments: int,
    precision: str,
    launch: Launch,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Outputs [T, H, V] like v, final states [R, H, K, V] and snapshots [R, M, H, K, V] from the terms."""
    rows, marks = plan.checkpoint_end.shape
    heads, key_dim, value_dim = initial_state.shape[1:]
    values, *terms = terms
    sequences = sequence_plan(plan, segments)
    count = rows * segments
    launches: dict[str, Any] = {"cuda": launch, "rocm": launch, "interpret": interpret}
    initial = initial_state
    if segments > 1:
        maps = triton.pallas_call(
            functools.partial(_segment_kernel, width=width, precision=precision),
            out_shape=jax.ShapeDtypeStruct((count, heads, value_dim + key_dim, key_dim), jnp.float32),
            grid=(count, heads, (value_dim + key_dim) // width),
            name="kda_prefill_segment",
            **launches,
        )(sequences.bounds[:, :: marks + 1], values, *terms)
        initial = triton.pallas_call(
            functools.partial(_join_kernel, width=width, segments=segments, precision=precision),
            out_shape=jax.ShapeDtypeStruct((count, heads, value_dim, key_dim), jnp.float32),
            grid=(rows, heads, value_dim // width),
            name="kda_prefill_join",
            cuda=JOIN_CUDA,
            rocm=JOIN_ROCM,
            interpret=interpret,
        )(initial_state, maps)
    out, states, snapshots = triton.pallas_call(
        functools.partial(
            _state_kernel, size=chunk, width=width, marks=marks, carried=segments > 1, precision=precision
        ),
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct(initial_state.shape, jnp.float32),
            jax.ShapeDtypeStruct((max(rows * marks, 1), heads, key_dim, value_dim), jnp.float32),
        ],
        grid=(count, heads, value_dim // width),
        name="kda_prefill_state",
        **launches,
    )(*sequences, plan.start, plan.length, initial, values, *terms)
    return out, states, snapshots[: rows * marks].reshape(rows, marks, heads, key_dim, value_dim)
