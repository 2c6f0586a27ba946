"""A plan as the arrays of the compiled steps, padded to a bucket. Plain numpy: nothing here touches a
device."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from glm_jax.steps import DecodeBatch, PrefillBatch, SamplingRows
from serving.request import Answer
from serving.scheduler import MAX_PREFILL_ROWS, Chunk, Scheduler

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
    current = [c.answer.request.prompt[c.start : c.start + c.length] for c in chunks]
    following = [_padded(c.answer.request.prompt[c.start + 1 :][: c.length], c.length, -1) for c in chunks]
    slots = np.array([chunk.answer.slot for chunk in chunks], np.int32)
    states = scheduler.state_slot[slots]
    cu_seqlens = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
    within = np.arange(real, dtype=np.int32) - np.repeat(cu_seqlens[:-1], lengths)
    return PrefillBatch(
        tokens=_padded(_joined(current), tokens, 0),
        next_tokens=_padded(_joined(following), tokens, -1),
        row_of_token=_padded(np.repeat(np.arange(len(chunks)), lengths), tokens, -1),
        positions=_padded(np.repeat(starts, lengths) + within, tokens, 0),
        cu_seqlens=_padded(cu_seqlens, rows + 1, real),
        row_starts=_padded(starts, rows, 0),
        block_tables=_padded(scheduler.block_tables[slots], rows, -1),
        state_slots=_padded(states, rows, -1),
        initial_slots=_padded(np.where(starts > 0, states, -1), rows, -1),
        snapshot_slots=_padded(NO_IDS, rows, -1),
        request_slots=_padded(slots, rows, -1),
        sample=_padded(np.array([chunk.last for chunk in chunks], bool), rows, False),
        limits=_padded(np.array([chunk.answer.request.limit for chunk in chunks], np.int32), rows, 0),
        sampling=sampling_rows([chunk.answer for chunk in chunks], rows),
    )


def decode_batch(answers: Sequence[Answer], scheduler: Scheduler, rows: int) -> DecodeBatch:
    """One window of each answer, in `rows` rows."""
    slots = np.array([answer.slot for answer in answers], np.int32)
    return DecodeBatch(
        block_tables=_padded(scheduler.block_tables[slots], rows, -1),
        state_slots=_padded(scheduler.state_slot[slots], rows, -1),
        request_slots=_padded(slots, rows, -1),
        limits=_padded(np.array([answer.request.limit for answer in answers], np.int32), rows, 0),
        publish_positions=_padded(NO_IDS, rows, -1),
        publish_slots=_padded(NO_IDS, rows, -1),
        sampling=sampling_rows(answers, rows),
    )


def sampling_rows(answers: Sequence[Answer], rows: int) -> SamplingRows:
    """Padding rows are greedy."""
    params = [answer.request.sampling for answer in answers]

    def column(values: list[float] | list[int], dtype: type, fill: float = 0) -> Any:
        return _padded(np.array(values, dtype), rows, fill)

    return SamplingRows(
        temperature=column([p.temperature for p in params], np.float32),
        top_k=column([p.top_k for p in params], np.int32),
        top_p=column([p.top_p for p in params], np.float32, 1),
        min_p=column([p.min_p for p in params], np.float32),
        seeds=column([answer.request.seed for answer in answers], np.uint32),
        choices=column([answer.index for answer in answers], np.int32),
    )


def _joined(pieces: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([NO_IDS, *pieces])


def _padded(values: np.ndarray, size: int, fill: float) -> Any:
    """`values` continued with `fill` to `size` along the first axis; 64-bit integers become int32.

    Typed Any because the steps' fields are declared as `jax.Array`; jit takes numpy arrays in their place.
    """
    dtype = np.int32 if values.dtype == np.int64 else values.dtype
    padded = np.full((size, *values.shape[1:]), fill, dtype)
    padded[: len(values)] = values
    return padded
