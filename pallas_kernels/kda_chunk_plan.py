"""Which tokens form which chunk when a ragged batch runs on the prefill kernels."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

SKIP, ZERO = -1, -2  # of SequencePlan.target


class ChunkPlan(NamedTuple):
    """Chunks of a ragged batch: a row's grid starts at its first token, and a checkpoint ends a chunk.

    N = T // C + R + R * M chunk slots, rows in order; unused slots have a count of zero.
    """

    start: jax.Array  # [N] first token of a chunk on the flat axis
    length: jax.Array  # [N] its tokens, at most C
    first: jax.Array  # [R + 1] first chunk of each row, and the end of the last row's chunks
    checkpoint_end: jax.Array  # [R, M] the chunk after the one that a checkpoint ends, -1 for none


def chunk_plan(cu_seqlens: jax.Array, checkpoints: jax.Array, tokens: int, chunk: int) -> ChunkPlan:
    """Plan for rows [cu_seqlens[r], cu_seqlens[r + 1]) of `tokens` tokens, in chunks of `chunk`.

    `checkpoints` [R, M] counts tokens of a row, 1..length, -1 for none.
    """
    rows, marks = checkpoints.shape
    slots = tokens // chunk + rows + rows * marks
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(cu_seqlens[1:], token, side="right", method="compare_all"), rows - 1)
    real = token < cu_seqlens[-1]
    after = jnp.where(checkpoints > 0, cu_seqlens[:-1, None] + checkpoints, tokens)
    starts = (token - cu_seqlens[row]) % chunk == 0
    # A checkpoint at its row's end marks the next row's first token, which starts a chunk anyway.
    starts = starts.at[after.reshape(-1)].set(True, mode="drop") & real
    ends = jnp.cumsum(starts.astype(jnp.int32))  # chunks that start at or before a token
    # Chunks that start before token t, for t in 0..tokens.
    started = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    owner = jnp.where(real, ends - 1, slots)
    return ChunkPlan(
        start=jnp.zeros(slots, jnp.int32).at[jnp.where(starts, owner, slots)].set(token, mode="drop"),
        length=jnp.zeros(slots, jnp.int32).at[owner].add(1, mode="drop"),
        first=started[jnp.minimum(cu_seqlens, tokens)],
        checkpoint_end=jnp.where(checkpoints > 0, started[jnp.minimum(after, tokens)], -1),
    )


class SequencePlan(NamedTuple):
    """Chunk ranges of the state kernel's sequences: Q = R rows times their segments, in order."""

    bounds: jax.Array  # [Q, M + 2] first chunk, the ends of the row's checkpoints in order, last chunk's end
    target: (
        jax.Array
    )  # [Q, M + 1] flat snapshot r * M + m to write at a bound, ZERO - that for zeros, or SKIP
    final: jax.Array  # [Q] row whose final state this sequence ends with, or -1


def sequence_plan(plan: ChunkPlan, segments: int) -> SequencePlan:
    rows, marks = plan.checkpoint_end.shape
    first, length = plan.first[:-1, None], (plan.first[1:] - plan.first[:-1])[:, None]
    part = jnp.arange(segments + 1, dtype=jnp.int32)[None, :]
    edges = first + (length * part + segments - 1) // segments
    start, stop = edges[:, :-1, None], edges[:, 1:, None]
    order = jnp.argsort(plan.checkpoint_end, axis=1).astype(jnp.int32)
    end = jnp.take_along_axis(plan.checkpoint_end, order, axis=1)[:, None, :]
    slot = (jnp.arange(rows, dtype=jnp.int32)[:, None] * marks + order)[:, None, :]
    unused = (end < 0) & (part[..., :-1, None] == 0)
    target = jnp.where((start < end) & (end <= stop), slot, jnp.where(unused, ZERO - slot, SKIP))
    bounds = jnp.concatenate([start, jnp.clip(end, start, stop), stop], axis=2)
    last = part[:, :-1] == segments - 1
    final = jnp.where(last, jnp.arange(rows, dtype=jnp.int32)[:, None], -1)
    return SequencePlan(
        bounds=bounds.reshape(rows * segments, marks + 2),
        target=jnp.pad(target.reshape(rows * segments, marks), ((0, 0), (0, 1)), constant_values=SKIP),
        final=final.reshape(rows * segments),
    )
