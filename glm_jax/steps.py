"""The two compiled steps of the engine: prefill of prompt chunks, and decode of verify windows.

Both take the cache pytree (donate it) and a batch whose numbers of rows and tokens are bucketed by the
caller; context length is never a shape. A decode step reads what it runs from the device's own row state,
so the next step can be dispatched before this one's tokens are read.

Sampling is keyed by (seed, choice, position): a draft is accepted exactly when it equals the token sampled at
its position, so outputs do not depend on the number of drafts.
"""

import jax
import jax.numpy as jnp
from flax import struct

from glm_jax import mtp, paged
from glm_jax.cache import Cache, slot_or_drop
from glm_jax.config import Config
from glm_jax.model import vocabulary_logits
from glm_jax.params import Params
from pallas_kernels.vocab_sampling import sample_tokens


@struct.dataclass
class SamplingRows:
    """Sampling parameters per row, `[rows]` each."""

    temperature: jax.Array  # float32, 0 is greedy
    top_k: jax.Array  # int32, 0 is off
    top_p: jax.Array  # float32, 1 is off
    min_p: jax.Array  # float32, 0 is off
    seeds: jax.Array  # uint32
    choices: jax.Array  # int32: which of a request's n answers this is


@struct.dataclass
class PrefillBatch:
    """Prompt chunks flattened to one token axis; rows of padding have slots -1 and no tokens."""

    tokens: jax.Array  # [tokens] int32
    next_tokens: jax.Array  # [tokens] int32: the prompt's following token, -1 after its last one
    row_of_token: jax.Array  # [tokens] int32, -1 padding
    positions: jax.Array  # [tokens] int32, absolute
    cu_seqlens: jax.Array  # [rows + 1] int32
    row_starts: jax.Array  # [rows] int32: absolute position of the chunk's first token
    block_tables: jax.Array  # [rows, blocks] int32, -1 unused
    state_slots: jax.Array  # [rows] int32: where the state after the chunk is kept
    initial_slots: jax.Array  # [rows] int32: where the chunk continues from (own or a snapshot), -1 empty
    snapshot_slots: jax.Array  # [rows] int32: a second copy of the state after the chunk, -1 none
    request_slots: jax.Array  # [rows] int32
    sample: jax.Array  # [rows] bool: the chunk reaches the prompt's end
    limits: jax.Array  # [rows] int32: positions at or past it are never run
    sampling: SamplingRows


@struct.dataclass
class DecodeBatch:
    """Running requests; token ids, positions and accepted counts are on the device already."""

    block_tables: jax.Array  # [rows, blocks] int32
    state_slots: jax.Array  # [rows] int32, -1 padding
    request_slots: jax.Array  # [rows] int32, -1 padding
    limits: jax.Array  # [rows] int32: positions at or past it are never run
    publish_positions: jax.Array  # [rows] int32: boundary whose state is stored when crossed, -1 none
    publish_slots: jax.Array  # [rows] int32
    sampling: SamplingRows


@struct.dataclass
class StepOutput:
    tokens: jax.Array  # [rows, window] int32: sampled tokens, those past `counts` are meaningless
    counts: jax.Array  # [rows] int32: how many of them are committed (0: the row sampled nothing)


def prefill(
    params: Params,
    config: Config,
    cache: Cache,
    batch: PrefillBatch,
    *,
    axis: str | None = None,
    implementation: str | None = None,
) -> tuple[StepOutput, Cache]:
    """Runs prompt chunks; rows with `sample` draw their first token and, with drafts on, their first drafts."""
    layout = paged.TokenLayout(
        batch.row_of_token, batch.positions, batch.row_starts, batch.block_tables, batch.request_slots
    )
    hidden, cache = paged.prefill_trunk(
        params,
        config,
        cache,
        layout,
        batch.tokens,
        batch.cu_seqlens,
        initial_slots=batch.initial_slots,
        write_slots=(batch.state_slots, batch.snapshot_slots),
        axis=axis,
        implementation=implementation,
    )
    last = batch.cu_seqlens[1:] - 1  # -1 for a leading empty row; its sample flag is False
    ends = batch.positions[jnp.maximum(last, 0)] + 1
    logits = vocabulary_logits(params, hidden[jnp.maximum(last, 0)], axis)
    sampled = _sample(logits, batch.sampling, ends, implementation)

    drafts = jnp.zeros((sampled.shape[0], 0), jnp.int32)
    if cache.window > 1:
        row = jnp.maximum(batch.row_of_token, 0)
        follows = jnp.where(batch.next_tokens < 0, sampled[row], batch.next_tokens)
        drafts, cache = mtp.draft(
            params,
            config,
            cache,
            layout,
            follows,
            hidden,
            jnp.where(batch.sample, last, -1),
            batch.limits,
            axis=axis,
            implementation=implementation,
        )
    slots = jnp.where(batch.sample, batch.request_slots, -1)
    cache = _store_rows(cache, slots, ends, jnp.zeros_like(ends), sampled, drafts)
    window = jnp.zeros((sampled.shape[0], cache.window), jnp.int32).at[:, 0].set(sampled)
    return StepOutput(window, batch.sample.astype(jnp.int32)), cache


def decode(
    params: Params,
    config: Config,
    cache: Cache,
    batch: DecodeBatch,
    *,
    axis: str | None = None,
    implementation: str | None = None,
) -> tuple[StepOutput, Cache]:
    """Verifies every row's window, commits what is accepted and drafts the next window."""
    window = cache.window
    rows = batch.request_slots.shape[0]
    live = batch.request_slots >= 0
    slot = jnp.maximum(batch.request_slots, 0)
    start = cache.rows.position[slot]
    accepted = jnp.where(live, cache.rows.accepted[slot], 0)
    tokens = cache.rows.tokens[slot]
    offset = jnp.arange(window, dtype=jnp.int32)
    positions = start[:, None] + offset
    runs = live[:, None] & (positions < batch.limits[:, None])

    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    layout = paged.TokenLayout(
        row_of_token=jnp.where(runs, row, -1).reshape(-1),
        positions=positions.reshape(-1),
        row_starts=start,
        block_tables=batch.block_tables,
        request_slots=batch.request_slots,
    )
    publish_after = batch.publish_positions - (start - accepted)
    crossed = (batch.publish_positions >= 0) & (publish_after >= 1) & (publish_after <= accepted)
    replay = paged.Replay(
        state_slots=batch.state_slots,
        request_slots=batch.request_slots,
        accepted=accepted,
        publish_after=jnp.where(crossed, publish_after, -1),
        publish_slots=jnp.where(crossed, batch.publish_slots, -1),
    )
    hidden, cache = paged.decode_trunk(
        params, config, cache, layout, tokens.reshape(-1), replay, axis=axis, implementation=implementation
    )
    logits = vocabulary_logits(params, hidden, axis)
    per_token = jax.tree.map(lambda x: jnp.repeat(x, window, axis=0), batch.sampling)
    sampled = _sample(logits, per_token, positions.reshape(-1) + 1, implementation).reshape(rows, window)

    agrees = (tokens[:, 1:] == sampled[:, :-1]) & runs[:, 1:]
    matched = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    counts = jnp.where(runs[:, 0], matched + 1, 0)
    newest = jnp.take_along_axis(sampled, matched[:, None], axis=1)[:, 0]
    newest = jnp.where(counts > 0, newest, tokens[:, 0])

    drafts = jnp.zeros((rows, 0), jnp.int32)
    if window > 1:
        committed = offset < counts[:, None]
        layout = layout.replace(row_of_token=jnp.where(committed, row, -1).reshape(-1))
        last = jnp.where(counts > 0, row[:, 0] * window + matched, -1)
        drafts, cache = mtp.draft(
            params,
            config,
            cache,
            layout,
            sampled.reshape(-1),
            hidden,
            last,
            batch.limits,
            axis=axis,
            implementation=implementation,
        )
    # a row at its limit commits nothing but its replay is done: accepted falls to 0, so no step repeats it
    cache = _store_rows(cache, batch.request_slots, start + counts, counts, newest, drafts)
    return StepOutput(sampled, counts), cache


def _sample(
    logits: jax.Array, sampling: SamplingRows, positions: jax.Array, implementation: str | None
) -> jax.Array:
    return sample_tokens(
        logits,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seeds,
        sampling.choices,
        positions,
        implementation=implementation,
    )


def _store_rows(
    cache: Cache,
    request_slots: jax.Array,
    position: jax.Array,
    accepted: jax.Array,
    token: jax.Array,
    drafts: jax.Array,
) -> Cache:
    state = cache.rows
    where = slot_or_drop(request_slots, state.position.shape[0])
    window = jnp.concatenate([token[:, None], drafts], axis=1)
    return cache.replace(
        rows=state.replace(
            position=state.position.at[where].set(position, mode="drop"),
            accepted=state.accepted.at[where].set(accepted, mode="drop"),
            tokens=state.tokens.at[where].set(window, mode="drop"),
        )
    )
