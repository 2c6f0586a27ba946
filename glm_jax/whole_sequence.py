"""Attention layers over whole right-padded rows, without a cache: teacher forcing, training, study.

Everything here is plain XLA, differentiable on every platform. Rows lie on the trunk's flat token axis as
`[batch * time]`; padding stands to the right of every row and, attention being causal, never reaches a
real token. Index selections carry no gradient (they are integers), as in the reference.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from glm_jax.config import Config
from glm_jax.layers.kda import kda_inputs, kda_output, split_qkv
from glm_jax.layers.mla import index_inputs, mla_inputs, mla_output
from glm_jax.params import Indexer, Kda, Mla
from pallas_kernels.kda import kda_chunked
from pallas_kernels.pool_index import pool_keys, score_pools, select_pools
from pallas_kernels.short_convolution import short_convolution

QUERY_BLOCK = 256
"""Queries attended at once. Scores are [batch, heads, QUERY_BLOCK, time] float32: 64 heads x 256 x 8192 are
0.5 GB where the whole square would be 17 GB."""


@dataclass(frozen=True)
class Rows:
    """Geometry of the batch: `lengths [batch]` real tokens of each right-padded row of `time` positions."""

    batch: int
    time: int
    lengths: jax.Array

    def split(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.batch, self.time, *x.shape[1:])

    def flatten(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.batch * self.time, *x.shape[2:])


def run_kda(p: Kda, config: Config, rows: Rows, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One KDA layer from empty state: `[batch * time, hidden]` -> output alike, final state.

    The state is `[batch, heads, dim, dim]` after each row's last real token.
    """
    inputs = kda_inputs(p, config, x)
    heads = p.A_log.shape[0]
    weight = p.conv.reshape(-1, p.conv.shape[-1])
    history = jnp.zeros((rows.batch, weight.shape[1] - 1, weight.shape[0]), inputs.qkv.dtype)
    convolved, _ = short_convolution(rows.split(inputs.qkv), weight, history, lengths=rows.lengths)
    q, k, v = split_qkv(convolved, heads)
    state = jnp.zeros((rows.batch, heads, k.shape[-1], v.shape[-1]), k.dtype)
    recurrent, state = kda_chunked(
        q,
        k,
        v,
        rows.split(inputs.log_decay),
        rows.split(inputs.beta),
        state,
        lengths=rows.lengths,
        implementation="xla",
    )
    return kda_output(p, config, rows.flatten(recurrent), inputs.output_gate, None), state


def run_mla(
    p: Mla, config: Config, rows: Rows, x: jax.Array, selection: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """One sparse MLA layer: `[batch * time, hidden]` -> (output, pool ids `[batch, time, k]`, -1 invalid).

    Keys and values are expanded from the latents per head, and the selection is applied as a mask: the
    form of the reference, and a check on the absorbed gather of the cached path.
    """
    inputs = mla_inputs(p, config, x)
    if p.indexer is not None:
        selection = select(p.indexer, config, rows, x, inputs.query_residual)
    if selection is None:
        raise ValueError("a shared indexer layer needs the selection of an earlier full one")
    latents = rows.split(inputs.latent)
    attended = attend_selected(p, config, rows.split(inputs.query), latents, selection)
    return mla_output(p, rows.flatten(attended), None), selection


def select(p: Indexer, config: Config, rows: Rows, x: jax.Array, query_residual: jax.Array) -> jax.Array:
    """Pools chosen by each query: `[batch, time, index_topk / kpool]` int32, ascending, -1 invalid."""
    index = index_inputs(p, config, x, query_residual)
    kpool = config.index_kpool
    pools = rows.time // kpool
    width = config.index_topk // kpool
    if pools == 0:
        return jnp.full((rows.batch, rows.time, width), -1, jnp.int32)

    def pooled_view(values: jax.Array) -> jax.Array:
        per_row = rows.split(values)[:, : pools * kpool]
        return per_row.reshape(rows.batch, pools, kpool, -1)

    pooled = pool_keys(pooled_view(index.key), pooled_view(index.gate), p.ape)

    def block(query: jax.Array, head_weights: jax.Array, positions: jax.Array) -> jax.Array:
        scores = score_pools(query, head_weights, pooled)
        counts = jnp.broadcast_to((positions + 1) // kpool, scores.shape[:-1])
        return select_pools(scores, counts, width)

    return _over_query_blocks(block, rows.time, rows.split(index.query), rows.split(index.head_weights))


def attend_selected(
    p: Mla, config: Config, query: jax.Array, latents: jax.Array, selection: jax.Array
) -> jax.Array:
    """Masked dense attention: query `[batch, time, heads, qk]`, latents `[batch, time, latent]` -> `[.., v]`.

    A query sees the tokens of its chosen pools and the tail of its open pool.
    """
    time = latents.shape[1]
    precision = jax.lax.Precision.HIGHEST if latents.dtype.itemsize >= 4 else None
    keys = jnp.einsum("bsl,hdl->bshd", latents, p.k_b.astype(latents.dtype), precision=precision)
    values = jnp.einsum("bsl,hvl->bshv", latents, p.v_b.astype(latents.dtype), precision=precision)
    scale = query.shape[-1] ** -0.5

    def block(query: jax.Array, selection: jax.Array, positions: jax.Array) -> jax.Array:
        visible = visible_tokens(selection, positions, time, config.index_kpool)
        scores = jnp.einsum(
            "bthd,bshd->bhts",
            query,
            keys,
            precision=precision,
            preferred_element_type=jnp.promote_types(query.dtype, jnp.float32),
        )
        scores = jnp.where(visible[:, None], scores * scale, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
        return jnp.einsum("bhts,bshv->bthv", weights, values, precision=precision)

    return _over_query_blocks(block, time, query, selection)


def visible_tokens(selection: jax.Array, positions: jax.Array, time: int, kpool: int) -> jax.Array:
    """Mask `[batch, queries, time]` of pool ids `[batch, queries, k]` at absolute `positions [queries]`."""
    pools = -(-time // kpool)
    batch, queries, _ = selection.shape
    b = jnp.arange(batch)[:, None, None]
    t = jnp.arange(queries)[None, :, None]
    chosen = jnp.zeros((batch, queries, pools + 1), bool)
    chosen = chosen.at[b, t, jnp.where(selection < 0, pools, selection)].set(True)[..., :pools]
    by_token = jnp.repeat(chosen, kpool, axis=-1)[..., :time]
    token = jnp.arange(time)
    tail_start = (positions + 1) // kpool * kpool
    tail = (token >= tail_start[:, None]) & (token <= positions[:, None])
    return by_token | tail


def _over_query_blocks(block: Callable[..., jax.Array], time: int, *per_query: jax.Array) -> jax.Array:
    """`block(*slices [batch, q, ...], positions [q])` over the time axis, one block of queries at a time."""
    if time <= QUERY_BLOCK:
        return block(*per_query, jnp.arange(time))
    blocks = -(-time // QUERY_BLOCK)
    padding = blocks * QUERY_BLOCK - time

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(x.shape[0], blocks, QUERY_BLOCK, *x.shape[2:]), 1, 0)

    starts = jnp.arange(blocks) * QUERY_BLOCK
    offsets = jnp.arange(QUERY_BLOCK)
    # recomputed in the backward pass: keeping them would hold [batch, heads, time, time]
    out = jax.lax.map(
        jax.checkpoint(lambda xs: block(*xs[1:], jnp.minimum(xs[0] + offsets, time - 1))),
        (starts, *map(split, per_query)),
    )
    return jnp.moveaxis(out, 0, 1).reshape(out.shape[1], blocks * QUERY_BLOCK, *out.shape[3:])[:, :time]
