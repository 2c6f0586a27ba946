"""The two compiled steps of the engine: prefill of prompt chunks, and decode of verify windows.

Both take the cache pytree (donate it) and a batch whose numbers of rows and tokens are bucketed by the
caller; context length is never a shape. A decode step reads what it runs from the device's own row state,
so the next step can be dispatched before this one's tokens are read.

Sampling is keyed by (seed, choice, position): a draft is accepted exactly when it equals the token sampled at
its position, so outputs do not depend on the number of drafts.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from glm_jax import mtp, paged
from glm_jax.cache import Cache, slot_or_drop
from glm_jax.config import Config
from glm_jax.model import vocabulary_logits
from glm_jax.params import Params
from glm_jax.sampling import (
    GrammarMask,
    Logprobs,
    SamplingRows,
    count_tokens,
    logprobs_of,
    process_logits,
    sample,
)

PROMPT_LOGPROB_TILE = 64
"""Rows of logits at once: 64 x 154,880 float32 are 40 MB."""


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
    initial_slots: jax.Array  # [rows] int32: state slot the chunk continues from, -1 empty state
    snapshot_after: (
        jax.Array
    )  # [rows, snapshots] int32: tokens of the chunk after which the state is kept, -1
    snapshot_slots: jax.Array  # [rows, snapshots] int32: in these state slots
    request_slots: jax.Array  # [rows] int32
    sample: jax.Array  # [rows] bool: the chunk reaches the prompt's end
    limits: jax.Array  # [rows] int32: positions at or past it are never run
    sampling: SamplingRows
    grammar: GrammarMask | None = None  # of a window of 1


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
    grammar: GrammarMask | None = None


@struct.dataclass
class StepOutput:
    tokens: jax.Array  # [rows, window] int32: sampled tokens, those past `counts` are meaningless
    counts: jax.Array  # [rows] int32: how many of them are committed (0: the row sampled nothing)
    starts: jax.Array  # [rows] int32: absolute position of the first of them
    drafts: jax.Array  # [rows, window - 1] int32: what the next window proposes
    healthy: jax.Array  # [rows] bool: no NaN among the logits of the positions that ran
    logits: jax.Array  # [rows, 1 or window, vocab]: raw, for `output_logprobs`; a shard's part under a mesh
    hidden: jax.Array | None  # [tokens, hidden]: prefill's, for `prompt_logprobs`


def prefill(
    params: Params,
    config: Config,
    cache: Cache,
    batch: PrefillBatch,
    *,
    axis: str | None = None,
    implementation: str | None = None,
) -> tuple[StepOutput, Cache]:
    """Runs prompt chunks; rows with `sample` draw their first token and, with drafts on, first drafts."""
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
        paged.ChunkStates(batch.initial_slots, batch.state_slots, batch.snapshot_after, batch.snapshot_slots),
        axis=axis,
        implementation=implementation,
    )
    last = batch.cu_seqlens[1:] - 1  # -1 for a leading empty row; its sample flag is False
    ends = batch.positions[jnp.maximum(last, 0)] + 1
    slots = jnp.where(batch.sample, batch.request_slots, -1)
    raw = vocabulary_logits(params, hidden[jnp.maximum(last, 0)])[:, None]
    nothing = jnp.full((slots.shape[0], 1), -1, jnp.int32)
    logits = process_logits(
        raw, cache.sampler, batch.sampling, slots, nothing, ends[:, None], batch.grammar, axis
    )
    sampled = sample(logits, batch.sampling, ends[:, None], axis, implementation)

    drafts = jnp.zeros((sampled.shape[0], 0), jnp.int32)
    if cache.window > 1:
        row = jnp.maximum(batch.row_of_token, 0)
        follows = jnp.where(batch.next_tokens < 0, sampled[row, 0], batch.next_tokens)
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
    counts = batch.sample.astype(jnp.int32)
    cache = _store_rows(cache, slots, ends, jnp.zeros_like(ends), sampled[:, 0], drafts)
    cache = replace(
        cache, sampler=count_tokens(cache.sampler, batch.sampling, slots, sampled, counts[:, None] > 0, axis)
    )
    tokens = jnp.pad(sampled, ((0, 0), (0, cache.window - 1)))
    healthy = ~jnp.isnan(jnp.max(raw, axis=(1, 2)))
    return StepOutput(tokens, counts, ends, drafts, healthy, raw, hidden), cache


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
    hidden, cache = paged.decode_trunk(
        params,
        config,
        cache,
        layout,
        tokens.reshape(-1),
        _replay(batch, start, accepted),
        axis=axis,
        implementation=implementation,
    )
    raw = vocabulary_logits(params, hidden).reshape(rows, window, -1)
    logits = process_logits(
        raw, cache.sampler, batch.sampling, batch.request_slots, tokens, positions + 1, batch.grammar, axis
    )
    sampled = sample(logits, batch.sampling, positions + 1, axis, implementation)

    agrees = (tokens[:, 1:] == sampled[:, :-1]) & runs[:, 1:]
    matched = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    counts = jnp.where(runs[:, 0], matched + 1, 0)
    newest = jnp.take_along_axis(sampled, matched[:, None], axis=1)[:, 0]
    newest = jnp.where(counts > 0, newest, tokens[:, 0])
    committed = offset < counts[:, None]

    drafts = jnp.zeros((rows, 0), jnp.int32)
    if window > 1:
        layout = replace(layout, row_of_token=jnp.where(committed, row, -1).reshape(-1))
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
    cache = replace(
        cache,
        sampler=count_tokens(cache.sampler, batch.sampling, batch.request_slots, sampled, committed, axis),
    )
    healthy = ~jnp.any(jnp.isnan(jnp.max(raw, axis=2)) & runs, axis=1)
    return StepOutput(sampled, counts, start + 1, drafts, healthy, raw, None), cache


def _replay(batch: DecodeBatch, start: jax.Array, accepted: jax.Array) -> paged.Replay:
    """Where the recorded window ends up, and whether committing it crosses the row's snapshot boundary."""
    after = batch.publish_positions - (start - accepted)
    crossed = (batch.publish_positions >= 0) & (after >= 1) & (after <= accepted)
    return paged.Replay(
        state_slots=batch.state_slots,
        request_slots=batch.request_slots,
        accepted=accepted,
        publish_after=jnp.where(crossed, after, -1),
        publish_slots=jnp.where(crossed, batch.publish_slots, -1),
    )


def output_logprobs(logits: jax.Array, tokens: jax.Array, top: int, axis: str | None = None) -> Logprobs:
    """Log-probabilities of a step's tokens, `[rows, 1 or window, ...]`, from its output.

    A program of its own, run where a request asks: a condition inside the step would make the host wait for
    the device in every step.
    """
    return logprobs_of(logits, tokens[:, : logits.shape[1]], top, axis)


def prompt_logprobs(
    params: Params, hidden: jax.Array, targets: jax.Array, top: int, axis: str | None = None
) -> Logprobs:
    """Log-probabilities of each prompt token's successor: `targets [tokens]`, `hidden [tokens, hidden]`.

    Works through the token axis in tiles, so logits never exceed `PROMPT_LOGPROB_TILE` rows.
    """
    count = hidden.shape[0]
    tile = min(PROMPT_LOGPROB_TILE, count)
    padding = -count % tile
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, tile, hidden.shape[1])
    targets = jnp.pad(jnp.maximum(targets, 0), (0, padding)).reshape(-1, tile)

    def one_tile(inputs: tuple[jax.Array, jax.Array]) -> Logprobs:
        logits = vocabulary_logits(params, inputs[0])
        return logprobs_of(logits, inputs[1], top, axis)

    tiles = jax.lax.map(one_tile, (hidden, targets))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], tiles)


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
    return replace(
        cache,
        rows=replace(
            state,
            position=state.position.at[where].set(position, mode="drop"),
            accepted=state.accepted.at[where].set(accepted, mode="drop"),
            tokens=state.tokens.at[where].set(window, mode="drop"),
        ),
    )
