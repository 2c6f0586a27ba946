"""A plan as the arrays of the compiled steps, padded to a bucket.

Plain numpy: nothing here touches a device.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from glm_jax.sampling import SamplingRows
from glm_jax.steps import DecodeBatch, PrefillBatch
from serving.plan import Chunk, Window
from serving.request import Answer
from serving.sampler_tables import needs_tables
from serving.scheduler import MAX_PREFILL_ROWS, MAX_SNAPSHOTS, Scheduler

SMALLEST_CHUNK = 64
NO_IDS = np.zeros(0, np.int32)


def token_buckets(most: int) -> tuple[int, ...]:
    """Token counts that prefill is compiled for: a factor of four apart, since each costs seconds of start-up
    and padding costs at most that factor for the shortest prompts."""
    buckets = [min(SMALLEST_CHUNK, most)]
    while buckets[-1] < most:
        buckets.append(min(4 * buckets[-1], most))
    return tuple(buckets)


def row_buckets(most: int) -> tuple[int, ...]:
    """Row counts that decode is compiled for: powers of two."""
    buckets = [1]
    while buckets[-1] < most:
        buckets.append(min(2 * buckets[-1], most))
    return tuple(buckets)


def smallest_bucket(buckets: Sequence[int], needed: int) -> int:
    return next(bucket for bucket in buckets if bucket >= needed)


def prefill_batch(chunks: Sequence[Chunk], scheduler: Scheduler, tokens: int) -> PrefillBatch:
    """The chunks on one axis of `tokens` tokens, in MAX_PREFILL_ROWS rows (or fewer if fewer can run)."""
    rows = min(MAX_PREFILL_ROWS, scheduler.rows.size)
    lengths = np.array([chunk.length for chunk in chunks], np.int32)
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    real = int(lengths.sum())
    current = [c.answer.tokens(c.start, c.start + c.length) for c in chunks]
    following = [
        _padded(c.answer.tokens(c.start + 1, min(c.start + c.length + 1, c.placement.target)), c.length, -1)
        for c in chunks
    ]
    slots = np.array([chunk.placement.row for chunk in chunks], np.int32)
    cu_seqlens = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
    within = np.arange(real, dtype=np.int32) - np.repeat(cu_seqlens[:-1], lengths)
    snapshots = np.full((2, rows, MAX_SNAPSHOTS), -1, np.int32)
    for row, chunk in enumerate(chunks):
        for column, pair in enumerate(chunk.snapshots):
            snapshots[:, row, column] = pair
    return PrefillBatch(
        tokens=_padded(_joined(current), tokens, 0),
        next_tokens=_padded(_joined(following), tokens, -1),
        row_of_token=_padded(np.repeat(np.arange(len(chunks)), lengths), tokens, -1),
        positions=_padded(np.repeat(starts, lengths) + within, tokens, 0),
        cu_seqlens=_padded(cu_seqlens, rows + 1, real),
        row_starts=_padded(starts, rows, 0),
        block_tables=_padded(scheduler.block_tables[slots], rows, -1),
        state_slots=_column([c.placement.state_slot for c in chunks], rows, -1),
        initial_slots=_column([c.initial_slot for c in chunks], rows, -1),
        snapshot_after=_array(snapshots[0]),
        snapshot_slots=_array(snapshots[1]),
        request_slots=_padded(slots, rows, -1),
        sample=_padded(np.array([chunk.last for chunk in chunks], bool), rows, False),
        limits=_column([c.answer.request.limit for c in chunks], rows, 0),
        sampling=sampling_rows([chunk.answer for chunk in chunks], rows),
    )


def decode_batch(windows: Sequence[Window], scheduler: Scheduler, rows: int) -> DecodeBatch:
    """One window of each answer, in `rows` rows."""
    slots = np.array([window.placement.row for window in windows], np.int32)
    tables = np.full((rows, scheduler.block_tables.shape[1]), -1, np.int32)
    for row, window in enumerate(windows):
        # nothing of a closed answer is run (limit 0), and its row of the table is gone already
        if window.limit:
            tables[row] = scheduler.block_tables[window.placement.row]
    return DecodeBatch(
        block_tables=_array(tables),
        state_slots=_column([w.placement.state_slot for w in windows], rows, -1),
        request_slots=_padded(slots, rows, -1),
        limits=_column([w.limit for w in windows], rows, 0),
        publish_positions=_column([w.publish_position for w in windows], rows, -1),
        publish_slots=_column([w.publish_slot for w in windows], rows, -1),
        sampling=sampling_rows([window.answer for window in windows], rows),
    )


def sampling_rows(answers: Sequence[Answer], rows: int) -> SamplingRows:
    """Padding rows are greedy."""
    params = [answer.request.sampling for answer in answers]

    def column(values: Sequence[float], dtype: type, fill: float = 0) -> Any:
        return _padded(np.array(values, dtype), rows, fill)

    return SamplingRows(
        temperature=column([p.temperature for p in params], np.float32),
        top_k=column([p.top_k for p in params], np.int32),
        top_p=column([p.top_p for p in params], np.float32, 1),
        min_p=column([p.min_p for p in params], np.float32),
        seeds=column([answer.request.seed for answer in answers], np.uint32),
        choices=column([answer.index for answer in answers], np.int32),
        repetition=column([p.repetition_penalty for p in params], np.float32, 1),
        frequency=column([p.frequency_penalty for p in params], np.float32),
        presence=column([p.presence_penalty for p in params], np.float32),
        ends_from=column([len(a.request.prompt) + a.request.sampling.min_tokens for a in answers], np.int32),
        processed=column([needs_tables(p) for p in params], np.bool_),
    )


def _column(values: Sequence[int], rows: int, fill: int) -> Any:
    return _padded(np.array(values, np.int32), rows, fill)


def _joined(pieces: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([NO_IDS, *pieces])


def _padded(values: np.ndarray, size: int, fill: float) -> Any:
    """`values` continued with `fill` to `size` along the first axis; 64-bit integers become int32."""
    dtype = np.int32 if values.dtype == np.int64 else values.dtype
    padded = np.full((size, *values.shape[1:]), fill, dtype)
    padded[: len(values)] = values
    return _array(padded)


def _array(values: np.ndarray) -> Any:
    """The steps' fields are declared as `jax.Array`; jit takes numpy arrays in their place."""
    return values
