"""Teacher forcing: logits of whole sequences."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from glm_jax import cache as caches
from glm_jax import paged, whole_sequence
from glm_jax.config import Config
from glm_jax.model import LayerObserver, trunk, vocabulary_logits
from glm_jax.params import Kda, Mla, Params
from glm_jax.rows import AlignedRows, align_left, check_mask, check_tokens
from pallas_kernels.dispatch import resolve


def forward(
    params: Params,
    config: Config,
    tokens: jax.Array,
    mask: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Logits of every position: `tokens [batch, time]` int32 -> `[batch, time, vocab]` float32.

    Float64 when the parameters are.

    `mask [batch, time]` bool marks real tokens, padded on the left or on the right; logits at padding are
    unspecified but finite. `implementation`: "xla" runs whole sequences in plain XLA and is differentiable on
    every platform; "triton" (GPU) and "interpret" (CPU, slow, for tests) run the kernels through the engine's
    cached path; None chooses by platform. Pure and jit-able: mark `config` and `implementation` static.
    ValueError for token ids outside the vocabulary, an empty batch or a mask with holes; value checks run on
    concrete arguments and are skipped under a trace.
    """
    check_tokens(tokens, config)
    check_mask(mask, tokens)
    return _forward(params, config, tokens, mask, implementation)


@partial(jax.jit, static_argnums=(1, 4))
def _forward(
    params: Params, config: Config, tokens: jax.Array, mask: jax.Array | None, implementation: str | None
) -> jax.Array:
    aligned = align_left(tokens, mask)
    if resolve(implementation) == "xla":
        hidden, _ = _whole(params, config, aligned)
    else:
        hidden = _through_cache(params, config, aligned, implementation)
    return aligned.restore(vocabulary_logits(params, hidden))


@struct.dataclass
class ModelStates:
    """Everything `model_states` records; rows are padded as the caller padded them."""

    hidden: jax.Array  # [batch, time, hidden]: final normed hidden, the vocabulary head's and MTP's input
    streams: jax.Array  # [layers, batch, time, streams, hidden]: outgoing streams of every layer
    kda_states: jax.Array  # [kda_layers, batch, heads, dim, dim] after each row's last real token


def model_states(
    params: Params, config: Config, tokens: jax.Array, mask: jax.Array | None = None
) -> ModelStates:
    """Per-layer states of a teacher-forced run, for study and comparison; arguments as for `forward`."""
    check_tokens(tokens, config)
    check_mask(mask, tokens)
    return _model_states(params, config, tokens, mask)


@partial(jax.jit, static_argnums=(1,))
def _model_states(params: Params, config: Config, tokens: jax.Array, mask: jax.Array | None) -> ModelStates:
    aligned = align_left(tokens, mask)
    streams: list[jax.Array] = []
    hidden, kda_states = _whole(params, config, aligned, lambda number, x: streams.append(x))
    batch, time = tokens.shape
    per_layer = [aligned.restore(x.reshape(batch, time, *x.shape[1:])) for x in streams]
    return ModelStates(aligned.restore(hidden), jnp.stack(per_layer), jnp.stack(kda_states))


def _whole(
    params: Params, config: Config, aligned: AlignedRows, observe: LayerObserver | None = None
) -> tuple[jax.Array, list[jax.Array]]:
    """The differentiable path: final hidden `[batch, time, hidden]` and the KDA layers' final states."""
    batch, time = aligned.tokens.shape
    rows = whole_sequence.Rows(batch, time, aligned.lengths)
    states: list[jax.Array] = []

    def kda_layer(p: Kda, index: int, x: jax.Array, state: None) -> tuple[jax.Array, None]:
        out, final = whole_sequence.run_kda(p, config, rows, x)
        states.append(final)
        return out, state

    def mla_layer(
        p: Mla, index: int, x: jax.Array, selection: jax.Array | None, state: None
    ) -> tuple[jax.Array, jax.Array, None]:
        out, selection = whole_sequence.run_mla(p, config, rows, x, selection)
        return out, selection, state

    hidden, _ = trunk(
        params,
        config,
        aligned.tokens.reshape(-1),
        kda_layer,
        mla_layer,
        None,
        implementation="xla",
        observe=observe,
    )
    return rows.split(hidden), states


def _through_cache(
    params: Params, config: Config, aligned: AlignedRows, implementation: str | None
) -> jax.Array:
    """The kernels' path: every row is one prompt chunk over a cache of its own blocks."""
    batch, time = aligned.tokens.shape
    block_size = config.index_kpool * max(1, 64 // config.index_kpool)
    per_row = -(-time // block_size)
    cache = caches.create(
        config,
        num_blocks=batch * per_row,
        block_size=block_size,
        num_state_slots=batch,
        num_request_slots=batch,
        dtype=params.embed_tokens.dtype,
    )
    rows = jnp.arange(batch, dtype=jnp.int32)
    time_axis = jnp.arange(time, dtype=jnp.int32)
    # rows are packed without gaps, padding last: the ragged kernels take cumulative lengths
    real = time_axis < aligned.lengths[:, None]
    packing = jnp.argsort(~real.reshape(-1), stable=True)
    cu_seqlens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(aligned.lengths, dtype=jnp.int32)])
    flat_row = jnp.where(real, rows[:, None], -1).reshape(-1)
    layout = paged.TokenLayout(
        row_of_token=flat_row[packing],
        positions=jnp.tile(time_axis, batch)[packing],
        row_starts=jnp.zeros_like(rows),
        block_tables=(rows[:, None] * per_row + jnp.arange(per_row, dtype=jnp.int32)),
        request_slots=rows,
    )
    nowhere = jnp.full_like(rows, -1)
    hidden, _ = paged.prefill_trunk(
        params,
        config,
        cache,
        layout,
        aligned.tokens.reshape(-1)[packing],
        cu_seqlens,
        paged.ChunkStates(nowhere, nowhere, nowhere[:, None][:, :0], nowhere[:, None][:, :0]),
        implementation=implementation,
    )
    return hidden[jnp.argsort(packing)].reshape(batch, time, -1)
