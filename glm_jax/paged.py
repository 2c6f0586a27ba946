"""Attention layers of cached steps: ragged prompt chunks and decode windows over the cache pytree.

The MLA side is one code for both phases: tokens on a flat axis write their latents and index keys first,
then select and attend through the block table, so a token sees itself and earlier tokens of its own chunk
or window exactly as later steps will. Only the KDA side differs between phases.

A layer is a jitted function of its number among its kind: 45 layers are traced and lowered as one of each
kind is, which takes 7 s for a whole step instead of a minute.
"""

from dataclasses import replace
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from flax import struct

from glm_jax.cache import Cache, slot_or_drop
from glm_jax.config import Config
from glm_jax.layers.kda import kda_inputs, kda_output, split_qkv
from glm_jax.layers.mla import absorb_query, expand_value, index_inputs, mla_inputs, mla_output
from glm_jax.model import MlaLayer, trunk
from glm_jax.params import Indexer, Kda, Mla, Params
from pallas_kernels.kda import kda_decode, kda_prefill
from pallas_kernels.pool_index import expand_pools, physical_rows, select_paged, write_pools
from pallas_kernels.short_convolution import short_convolution_decode, short_convolution_ragged
from pallas_kernels.sparse_mla import sparse_mla, write_latents


@struct.dataclass
class TokenLayout:
    """Where each token of a flat axis belongs. Tokens of a row are consecutive and so are their positions."""

    row_of_token: jax.Array  # [tokens] int32, -1 padding
    positions: jax.Array  # [tokens] int32 absolute positions in the request
    row_starts: jax.Array  # [rows] int32: position of the row's first token on this axis
    block_tables: jax.Array  # [rows, blocks] int32, -1 unused
    request_slots: jax.Array  # [rows] int32, -1 padding


@partial(jax.jit, static_argnames=("config", "reuse_selection", "axis", "implementation"))
def run_mla(
    p: Mla,
    config: Config,
    cache: Cache,
    layer: int | jax.Array,
    layout: TokenLayout,
    x: jax.Array,
    selection: jax.Array | None,
    *,
    reuse_selection: bool = False,
    axis: str | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, Cache]:
    """One sparse MLA layer over cached context: `x [tokens, hidden]` -> (output, selection, cache).

    `selection` is `[tokens, index_topk + kpool - 1]` physical cache rows (-1 invalid). A layer with an
    indexer computes its own unless `reuse_selection`; then its indexer neither scores nor writes keys.
    """
    inputs = mla_inputs(p, config, x)
    own_rows = physical_rows(
        layout.positions[:, None], layout.row_of_token, layout.block_tables, cache.block_size
    )[:, 0]
    cache, latents, scales = _write_latents(cache, layer, own_rows, inputs.latent)
    if p.indexer is not None and not reuse_selection:
        selection, cache = _select(
            p.indexer, config, cache, layer, layout, x, inputs.query_residual, implementation
        )
    if selection is None:
        raise ValueError("a shared indexer layer needs the selection of an earlier full one")
    attended = sparse_mla(
        absorb_query(p, inputs.query),
        latents,
        selection,
        scale=inputs.query.shape[-1] ** -0.5,
        layer=layer,
        latent_scales=scales,
        implementation=implementation,
    )
    return mla_output(p, expand_value(p, attended), axis), selection, cache


def _write_latents(
    cache: Cache, layer: int | jax.Array, rows: jax.Array, values: jax.Array
) -> tuple[Cache, jax.Array, jax.Array | None]:
    """Stores `values [tokens, rank]` at cache rows; also returns the latents and their scales by row."""
    layers, blocks, block_size, rank = cache.latents.shape
    latents = cache.latents.reshape(layers, blocks * block_size, rank)
    scales = cache.latent_scales
    if scales is None:
        latents = cast(jax.Array, write_latents(latents, layer, rows, values))
        return replace(cache, latents=latents.reshape(cache.latents.shape)), latents, None
    by_row = scales.reshape(layers, blocks * block_size, -1)
    written = write_latents(latents, layer, rows, values, by_row)
    latents, by_row = cast(tuple[jax.Array, jax.Array], written)
    cache = replace(
        cache, latents=latents.reshape(cache.latents.shape), latent_scales=by_row.reshape(scales.shape)
    )
    return cache, latents, by_row


def _select(
    p: Indexer,
    config: Config,
    cache: Cache,
    layer: int | jax.Array,
    layout: TokenLayout,
    x: jax.Array,
    query_residual: jax.Array,
    implementation: str | None,
) -> tuple[jax.Array, Cache]:
    """Writes this batch's index keys, then chooses each token's context as physical rows."""
    index = index_inputs(p, config, x, query_residual)
    kpool = config.index_kpool
    ring, pooled = write_pools(
        cache.ring,
        cache.pooled,
        layer,
        index.key,
        index.gate,
        p.ape,
        layout.row_of_token,
        layout.positions,
        layout.row_starts,
        layout.request_slots,
        layout.block_tables,
    )
    pools = select_paged(
        index.query,
        index.head_weights,
        pooled,
        layer,
        layout.block_tables,
        layout.row_of_token,
        jnp.where(layout.row_of_token < 0, 0, (layout.positions + 1) // kpool),
        config.index_topk // kpool,
        implementation=implementation,
    )
    tokens = expand_pools(pools, layout.positions, kpool)
    rows = physical_rows(tokens, layout.row_of_token, layout.block_tables, cache.block_size)
    return rows, replace(cache, ring=ring, pooled=pooled)


@struct.dataclass
class ChunkStates:
    """Which KDA states prompt chunks start from and leave behind (state slots, -1 none)."""

    initial: jax.Array  # [rows] int32: where the row continues from, -1 for empty state
    final: jax.Array  # [rows] int32: where the state after the row's last token goes
    snapshot_after: jax.Array  # [rows, snapshots] int32: tokens of the chunk after which the state is kept
    snapshots: jax.Array  # [rows, snapshots] int32: in these slots


@partial(jax.jit, static_argnames=("config", "axis", "implementation"))
def run_kda_prefill(
    p: Kda,
    config: Config,
    cache: Cache,
    layer: int | jax.Array,
    cu_seqlens: jax.Array,
    slots: ChunkStates,
    x: jax.Array,
    *,
    axis: str | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Cache]:
    """One KDA layer over ragged chunks: `x [tokens, hidden]` -> (output, cache)."""
    inputs = kda_inputs(p, config, x)
    heads = p.A_log.shape[0]
    weight = p.conv.reshape(-1, p.conv.shape[-1])
    rows, history_rows = slots.initial.shape[0], weight.shape[1] - 1
    fresh = slots.initial < 0
    source = jnp.maximum(slots.initial, 0)
    history = cache.conv[layer, source, :history_rows].reshape(rows, history_rows, -1)
    history = jnp.where(fresh[:, None, None], 0, history)
    state = jnp.where(fresh[:, None, None, None], 0, cache.kda_state[layer, source])
    checkpoints = slots.snapshot_after if slots.snapshot_after.shape[1] else None

    convolved, history, *history_snapshots = short_convolution_ragged(
        inputs.qkv, weight, history, cu_seqlens, checkpoints=checkpoints
    )
    q, k, v = split_qkv(convolved, heads)
    recurrent, state, *state_snapshots = kda_prefill(
        q,
        k,
        v,
        inputs.log_decay,
        inputs.beta,
        state,
        cu_seqlens,
        checkpoints=checkpoints,
        gate_lower_bound=config.gate_lower_bound,
        implementation=implementation,
    )
    cache = _store_states(cache, layer, slots.final, state, history)
    if checkpoints is not None:
        flat = (x.reshape(-1, *x.shape[2:]) for x in (*state_snapshots, *history_snapshots))
        cache = _store_states(cache, layer, slots.snapshots.reshape(-1), *flat)
    return kda_output(p, config, recurrent, inputs.output_gate, axis), cache


def _store_states(
    cache: Cache, layer: int | jax.Array, slots: jax.Array, state: jax.Array, history: jax.Array
) -> Cache:
    """Writes states `[n, heads, dim, dim]` and conv histories `[n, taps - 1, channels]` to `slots [n]`.

    A slot's last-window part becomes zero: nothing of it is accepted.
    """
    rows, taken = history.shape[:2]
    conv = jnp.zeros((rows, *cache.conv.shape[2:]), cache.conv.dtype)
    conv = conv.at[:, :taken].set(history.reshape(rows, taken, *cache.conv.shape[3:]).astype(conv.dtype))
    where = slot_or_drop(slots, cache.kda_state.shape[1])
    return replace(
        cache,
        kda_state=cache.kda_state.at[layer, where].set(state.astype(cache.kda_state.dtype), mode="drop"),
        conv=cache.conv.at[layer, where].set(conv, mode="drop"),
    )


@struct.dataclass
class Replay:
    """What a decode window does to the committed state before it runs (all `[rows]` int32)."""

    state_slots: jax.Array  # the request's state slot, -1 padding
    request_slots: jax.Array  # whose records are replayed, -1 padding
    accepted: jax.Array  # how many recorded tokens are committed
    publish_after: jax.Array  # also store the state after that many of them, -1 never
    publish_slots: jax.Array  # in this slot


@partial(jax.jit, static_argnames=("config", "axis", "implementation"))
def run_kda_decode(
    p: Kda,
    config: Config,
    cache: Cache,
    layer: int | jax.Array,
    replay: Replay,
    x: jax.Array,
    *,
    axis: str | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Cache]:
    """One KDA layer over decode windows: `x [rows * window, hidden]` -> (output, cache)."""
    inputs = kda_inputs(p, config, x)
    heads = p.A_log.shape[0]
    rows, window = replay.state_slots.shape[0], cache.window
    weight = p.conv.reshape(-1, p.conv.shape[-1])
    conv = cache.conv.reshape(*cache.conv.shape[:3], -1)
    convolved, conv = short_convolution_decode(
        inputs.qkv.reshape(rows, window, -1),
        weight,
        conv,
        layer,
        replay.state_slots,
        replay.accepted,
        publish_after=replay.publish_after,
        publish_slots=replay.publish_slots,
        implementation=implementation,
    )
    q, k, v = split_qkv(convolved, heads)
    recurrent, state, records = kda_decode(
        q,
        k,
        v,
        inputs.log_decay.reshape(rows, window, heads, -1),
        inputs.beta.reshape(rows, window, heads),
        cache.kda_state,
        layer,
        replay.state_slots,
        cache.records,
        replay.request_slots,
        replay.accepted,
        publish_after=replay.publish_after,
        publish_slots=replay.publish_slots,
        implementation=implementation,
    )
    cache = replace(cache, kda_state=state, conv=conv.reshape(cache.conv.shape), records=records)
    flat = recurrent.reshape(rows * window, *recurrent.shape[2:])
    return kda_output(p, config, flat, inputs.output_gate, axis), cache


def prefill_trunk(
    params: Params,
    config: Config,
    cache: Cache,
    layout: TokenLayout,
    tokens: jax.Array,
    cu_seqlens: jax.Array,
    states: ChunkStates,
    *,
    axis: str | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Cache]:
    """All layers over ragged prompt chunks: `tokens [tokens]` -> (final hidden `[tokens, hidden]`, cache).

    `cu_seqlens [rows + 1]`: cumulative chunk lengths.
    """

    def kda_layer(p: Kda, index: int, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        return run_kda_prefill(
            p,
            config,
            cache,
            index,
            cu_seqlens,
            states,
            x,
            axis=axis,
            implementation=implementation,
        )

    return trunk(
        params,
        config,
        tokens,
        kda_layer,
        _mla_layer(config, layout, axis, implementation),
        cache,
        axis=axis,
        implementation=implementation,
    )


def decode_trunk(
    params: Params,
    config: Config,
    cache: Cache,
    layout: TokenLayout,
    tokens: jax.Array,
    replay: Replay,
    *,
    axis: str | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Cache]:
    """All layers over decode windows: `tokens [rows * window]` -> (final hidden, cache)."""

    def kda_layer(p: Kda, index: int, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        return run_kda_decode(p, config, cache, index, replay, x, axis=axis, implementation=implementation)

    return trunk(
        params,
        config,
        tokens,
        kda_layer,
        _mla_layer(config, layout, axis, implementation),
        cache,
        axis=axis,
        implementation=implementation,
    )


def _mla_layer(config: Config, layout: TokenLayout, axis: str | None, implementation: str | None) -> MlaLayer:
    def mla_layer(
        p: Mla, index: int, x: jax.Array, selection: jax.Array | None, cache: Cache
    ) -> tuple[jax.Array, jax.Array, Cache]:
        return run_mla(
            p, config, cache, index, layout, x, selection, axis=axis, implementation=implementation
        )

    return mla_layer
