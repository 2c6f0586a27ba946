"""From hidden states to tokens, per request: logit processing, sampling, log-probabilities.

Logits may be one shard of the vocabulary (`axis`); per-request tables are sharded alike, so nothing of
vocabulary size is ever gathered to sample.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from glm_jax.cache import SamplerTables, slot_or_drop
from glm_jax.collectives import all_gather_last, shard_start
from pallas_kernels.vocab_sampling import apply_mask, apply_penalties, sample_tokens


@struct.dataclass
class SamplingRows:
    """Sampling parameters per row, `[rows]` each."""

    temperature: jax.Array  # float32, 0 is greedy
    top_k: jax.Array  # int32, 0 is off
    top_p: jax.Array  # float32, 1 is off
    min_p: jax.Array  # float32, 0 is off
    seeds: jax.Array  # uint32
    choices: jax.Array  # int32: which of a request's n answers this is
    repetition: jax.Array  # float32, 1 is off
    frequency: jax.Array  # float32, 0 is off
    presence: jax.Array  # float32, 0 is off
    ends_from: jax.Array  # int32: first absolute position at which an end token may stand
    processed: jax.Array  # bool: whether the row has tables (penalties, bias, allowed tokens, minimum length)


@struct.dataclass
class GrammarMask:
    """Which tokens guided rows may draw; other rows' bits are all set."""

    words: jax.Array  # [rows, window, ceil(vocab / 32)] uint32, lowest bit first, of the whole vocabulary
    active: jax.Array  # [] bool: whether any row is guided; without one the words do not matter


@struct.dataclass
class Logprobs:
    """Natural log-probabilities of the raw logits."""

    token: jax.Array  # [..., ] float32 of the token that was chosen
    rank: jax.Array  # [..., ] int32, 1 for the most probable
    top_ids: jax.Array  # [..., k] int32, descending probability, ties to the lowest id
    top: jax.Array  # [..., k] float32


def process_logits(
    logits: jax.Array,
    tables: SamplerTables,
    rows: SamplingRows,
    request_slots: jax.Array,
    window: jax.Array,
    positions: jax.Array,
    grammar: GrammarMask | None = None,
    axis: str | None = None,
) -> jax.Array:
    """Penalties, bias and minimum length, then the grammar, on `logits [rows, window, vocab]`.

    `window [rows, window]` are the tokens being verified: the first is counted in the tables already, the
    drafts after it count for the positions behind them. `positions [rows, window]` are those of the tokens to
    be sampled. Rows without tables pass unchanged. Nothing here branches: at a branch the host of a GPU waits
    for the device, and the next step is not dispatched ahead.
    """
    count, width, size = logits.shape
    start = shard_start(size, axis)

    slot = jnp.maximum(request_slots, 0)
    counts = tables.counts[slot][:, None]
    ids = start + jnp.arange(size, dtype=jnp.int32)
    for draft in range(1, width):
        behind = jnp.arange(width)[None, :, None] >= draft
        counts = counts + (behind & (window[:, draft, None, None] == ids))
    prompt = jnp.broadcast_to(tables.prompt[slot][:, None], logits.shape)
    counts = jnp.broadcast_to(counts, logits.shape)

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(count * width, size)

    repetition, frequency, presence = (
        jnp.repeat(x, width) for x in (rows.repetition, rows.frequency, rows.presence)
    )
    processed = apply_penalties(flat(logits), flat(prompt), flat(counts), repetition, frequency, presence)
    processed = processed.reshape(logits.shape) + tables.bias[slot][:, None].astype(logits.dtype)
    too_early = (positions < rows.ends_from[:, None])[..., None] & tables.ends[slot][:, None]
    processed = jnp.where(too_early, -jnp.inf, processed)
    logits = jnp.where(rows.processed[:, None, None], processed, logits)
    if grammar is None:
        return logits
    words = grammar.words.reshape(count * width, -1)
    if axis is not None:
        words = _words_of_shard(words, start, size)
    guided = apply_mask(logits.reshape(count * width, size), words).reshape(logits.shape)
    return jnp.where(grammar.active, guided, logits)


def _words_of_shard(words: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
    """The mask words of vocabulary ids [start, start + size); shards begin on whole words."""
    if size % 32:
        raise ValueError(f"a vocabulary shard of {size} ids does not begin on a mask word (32 ids)")
    return jax.lax.dynamic_slice_in_dim(words, start // 32, size // 32, axis=1)


def sample(
    logits: jax.Array,
    rows: SamplingRows,
    positions: jax.Array,
    axis: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Tokens `[rows, window]` of processed `logits [rows, window, vocab]`; noise is keyed by position."""
    count, width, size = logits.shape

    def flat(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, width)

    tokens = sample_tokens(
        logits.reshape(count * width, size),
        flat(rows.temperature),
        flat(rows.top_k),
        flat(rows.top_p),
        flat(rows.min_p),
        flat(rows.seeds),
        flat(rows.choices),
        positions.reshape(-1),
        axis_name=axis,
        implementation=implementation,
    )
    return tokens.reshape(count, width)


def count_tokens(
    tables: SamplerTables,
    rows: SamplingRows,
    request_slots: jax.Array,
    tokens: jax.Array,
    committed: jax.Array,
    axis: str | None = None,
) -> SamplerTables:
    """Adds committed `tokens [rows, window]` (mask of the same shape) to the counts of rows with tables."""
    size = tables.counts.shape[1]
    local = tokens - shard_start(size, axis)
    counted = committed & rows.processed[:, None] & (local >= 0) & (local < size)
    slots = slot_or_drop(jnp.where(counted, request_slots[:, None], -1), tables.counts.shape[0])
    return replace(tables, counts=tables.counts.at[slots, local].add(1, mode="drop"))


def logprobs_of(logits: jax.Array, tokens: jax.Array, top: int, axis: str | None = None) -> Logprobs:
    """Log-probabilities of `tokens [...]` under raw `logits [..., vocab]` and the `top` best alternatives."""
    whole = jax.nn.log_softmax(all_gather_last(logits, axis), axis=-1)
    values, ids = jax.lax.top_k(whole, top)
    token = jnp.take_along_axis(whole, tokens[..., None], axis=-1)
    rank = jnp.sum(whole > token, axis=-1, dtype=jnp.int32) + 1
    return Logprobs(
        token[..., 0].astype(jnp.float32), rank, ids.astype(jnp.int32), values.astype(jnp.float32)
    )
