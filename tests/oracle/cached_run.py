"""Teacher forcing through the cache: prompt pieces, then decode windows with rejected drafts, any mix of
rows.

Unused cache memory is NaN, block ids are shuffled and one padding row runs along, so that a read or write
in the wrong place shows in the logits.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import glm_jax
from glm_jax import cache as caches
from glm_jax import paged
from glm_jax.model import vocabulary_logits


@partial(jax.jit, static_argnums=(1,), donate_argnums=(2,))
def _prefill(params, config, cache, layout, tokens, cu_seqlens, states):
    hidden, cache = paged.prefill_trunk(
        params, config, cache, layout, tokens, cu_seqlens, states, implementation="xla"
    )
    return vocabulary_logits(params, hidden), cache


@partial(jax.jit, static_argnums=(1,), donate_argnums=(2,))
def _decode(params, config, cache, layout, tokens, replay):
    hidden, cache = paged.decode_trunk(params, config, cache, layout, tokens, replay, implementation="xla")
    return vocabulary_logits(params, hidden), cache


class CachedRun:
    """Feeds known tokens [rows, time] through the cache and gathers logits [rows, time, vocab]."""

    def __init__(self, model: glm_jax.Model, tokens: np.ndarray, window: int, seed: int):
        self.model, self.tokens, self.window = model, tokens, window
        self.random = np.random.default_rng(seed)
        rows, time = tokens.shape
        config = model.config
        block = 16 // config.index_kpool * config.index_kpool
        per_row = -(-(time + window) // block)
        blocks, slots = rows * per_row + 3, rows + 2
        self.cache = caches.create(
            config,
            fill=np.nan,
            num_blocks=blocks,
            block_size=block,
            num_state_slots=slots,
            num_request_slots=slots,
            drafts=window - 1,
            dtype=model.params.embed_tokens.dtype,
        )
        tables = self.random.permutation(blocks)[: rows * per_row].reshape(rows, per_row).astype(np.int32)
        self.tables = np.concatenate([tables, np.full((1, per_row), -1, np.int32)])  # the last row is padding
        self.state_slots = np.append(self.random.permutation(slots)[:rows], -1).astype(np.int32)
        self.request_slots = np.append(self.random.permutation(slots)[:rows], -1).astype(np.int32)
        self.done = np.zeros(rows, np.int32)  # tokens whose logits are final
        self.accepted = np.zeros(rows, np.int32)  # of the last decode window
        self.logits = np.full((rows, time, config.vocab_size), np.nan, model.params.embed_tokens.dtype)

    def _layout(
        self, row_of_token: np.ndarray, positions: np.ndarray, starts: np.ndarray
    ) -> paged.TokenLayout:
        return paged.TokenLayout(
            row_of_token=jnp.asarray(row_of_token, jnp.int32),
            positions=jnp.asarray(positions, jnp.int32),
            row_starts=jnp.asarray(starts, jnp.int32),
            block_tables=jnp.asarray(self.tables),
            request_slots=jnp.asarray(self.request_slots),
        )

    def prefill(self, pieces: np.ndarray, capacity: int) -> None:
        """Runs the next `pieces[row]` tokens of every row (0: it rests) in one step of `capacity` tokens."""
        rows = len(pieces)
        spans = [np.arange(start, start + piece) for start, piece in zip(self.done, pieces, strict=True)]
        used = int(sum(pieces))
        row_of_token = np.full(capacity, -1, np.int32)
        positions, tokens = np.zeros(capacity, np.int32), np.zeros(capacity, np.int32)
        row_of_token[:used] = np.repeat(np.arange(rows), pieces)
        positions[:used] = np.concatenate(spans)
        tokens[:used] = self.tokens[row_of_token[:used], positions[:used]]
        lengths = np.append(pieces, 0)
        resting = lengths == 0
        logits, self.cache = _prefill(
            self.model.params,
            self.model.config,
            self.cache,
            self._layout(row_of_token, positions, np.append(self.done, 0)),
            jnp.asarray(tokens),
            jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32),
            paged.ChunkStates(
                initial=jnp.asarray(np.where(resting | (np.append(self.done, 0) == 0), -1, self.state_slots)),
                final=jnp.asarray(np.where(resting, -1, self.state_slots)),
                snapshot_after=jnp.zeros((rows + 1, 0), jnp.int32),
                snapshots=jnp.zeros((rows + 1, 0), jnp.int32),
            ),
        )
        logits = np.asarray(logits)
        self.logits[row_of_token[:used], positions[:used]] = logits[:used]
        self.done += pieces.astype(np.int32)

    def decode(self, accept: np.ndarray) -> None:
        """Runs one window of every row; its first `accept[row]` tokens are true, the rest wrong drafts."""
        rows, time = self.tokens.shape
        positions = self.done[:, None] + np.arange(self.window)
        accept = np.minimum(accept, time - self.done)
        true = self.tokens[np.arange(rows)[:, None], np.minimum(positions, time - 1)]
        wrong = (true + 1 + self.random.integers(0, 7, true.shape)) % self.model.config.vocab_size
        kept = np.arange(self.window) < accept[:, None]
        window = np.concatenate([np.where(kept, true, wrong), np.zeros((1, self.window), np.int64)])
        finished = accept == 0
        live = np.append(~finished, False)
        row_of_token = np.repeat(np.where(live, np.arange(rows + 1), -1), self.window)
        padded = np.concatenate([positions, np.zeros((1, self.window), np.int32)])
        slots = np.where(live, self.state_slots, -1).astype(np.int32)
        replay = paged.Replay(
            state_slots=jnp.asarray(slots),
            request_slots=jnp.asarray(np.where(live, self.request_slots, -1), jnp.int32),
            accepted=jnp.asarray(np.append(np.where(finished, 0, self.accepted), 0), jnp.int32),
            publish_after=jnp.full(rows + 1, -1, jnp.int32),
            publish_slots=jnp.full(rows + 1, -1, jnp.int32),
        )
        logits, self.cache = _decode(
            self.model.params,
            self.model.config,
            self.cache,
            self._layout(row_of_token, padded.reshape(-1), np.append(self.done, 0)),
            jnp.asarray(window.reshape(-1), jnp.int32),
            replay,
        )
        logits = np.asarray(logits).reshape(rows + 1, self.window, -1)
        for row in range(rows):
            self.logits[row, self.done[row] : self.done[row] + accept[row]] = logits[row, : accept[row]]
        self.accepted = np.where(finished, self.accepted, accept)
        self.done += accept.astype(np.int32)
