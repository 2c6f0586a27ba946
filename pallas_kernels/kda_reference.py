"""Kimi delta attention (KDA) in plain XLA: the recurrence, its chunk form and the ragged chunk form.

Recurrence for one head with state S in R^{K x V} (Kimi Linear, arXiv 2510.26692):

    S <- diag(exp(g_t)) S;  u_t = beta_t (v_t - S^T k_t);  S <- S + k_t u_t^T;  o_t = S^T q_t

Chunk form over C tokens with G_i = sum_{j<=i} g_j and the state S_0 before the chunk:

    A_ij = beta_i sum_d k_id k_jd exp(G_id - G_jd) for i > j
    P_ij = sum_d q_id k_jd exp(G_id - G_jd) for i >= j
    (I + A) [U | W] = diag(beta) [V | K exp(G)];  u = U - W S_0
    o = (Q exp(G)) S_0 + P u;  S_n = diag(exp(G_n)) S_0 + sum_{i<=n} (k_i exp(G_n - G_i)) u_i^T

Every exponent here is a difference that is at most zero, so no gate can overflow, bounded below or not.
Everything accumulates in at least float32 and in float64 for float64 inputs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_HIGHEST = lax.Precision.HIGHEST
# Chunks whose token-parallel part is computed at once: bounds the [C, C, K] decay tensors alive together.
_CHUNKS_PER_BLOCK = 16


class ChunkTerms(NamedTuple):
    """What a chunk needs before its initial state is known; leading axes are free, C is the chunk."""

    values: jax.Array  # [..., C, V] U
    weights: jax.Array  # [..., C, K] W
    scores: jax.Array  # [..., C, C] P
    queries: jax.Array  # [..., C, K] Q exp(G)
    keys: jax.Array  # [..., C, K]
    decays: jax.Array  # [..., C, K] G


def accumulation_dtype(*arrays: jax.Array) -> jnp.dtype:
    """float32, or float64 when any array is float64."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def einsum(subscripts: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *operands, precision=_HIGHEST)


def token_step(
    state: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array
) -> jax.Array:
    """State [..., K, V] after one token: k, log_decay [..., K], v [..., V], beta [...]."""
    state = state * jnp.exp(log_decay)[..., None]
    update = beta[..., None] * (v - einsum("...kv,...k->...v", state, k))
    return state + k[..., None] * update[..., None, :]


def recurrent(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Token by token: q, k, log_decay [batch, time, H, K], v [batch, time, H, V], beta [batch, time, H]."""
    dtype = accumulation_dtype(q, k, v, log_decay, beta, initial_state)

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q_t, k_t, v_t, g_t, beta_t = token
        state = token_step(state, k_t, v_t, g_t, beta_t)
        return state, einsum("...kv,...k->...v", state, q_t)

    tokens = tuple(jnp.moveaxis(x, 1, 0).astype(dtype) for x in (q, k, v, log_decay, beta))
    state, out = lax.scan(step, initial_state.astype(dtype), tokens)
    return jnp.moveaxis(out, 0, 1).astype(v.dtype), state


def chunk_terms(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array
) -> ChunkTerms:
    """Token-parallel part of a chunk: q, k, log_decay [..., C, K], v [..., C, V], beta [..., C]."""
    size = k.shape[-2]
    # A decay below the square of the dtype's epsilon forgets everything; bounding it keeps the prefix sums,
    # whose differences become exponents, small enough to be accurate for gates without a lower bound.
    floor = 2.0 * math.log(float(jnp.finfo(k.dtype).eps))
    decays = jnp.cumsum(jnp.maximum(log_decay, floor), axis=-2)
    rows = jnp.arange(size)
    causal = rows[:, None] >= rows[None, :]
    difference = decays[..., :, None, :] - decays[..., None, :, :]
    decay = jnp.exp(jnp.where(causal[..., None], difference, -jnp.inf))
    # Products and sums rather than dots: XLA fuses them, so the [C, C, K] tensors need not exist in memory.
    scores = jnp.sum(q[..., :, None, :] * k[..., None, :, :] * decay, axis=-1)
    coupling = jnp.sum(k[..., :, None, :] * k[..., None, :, :] * decay, axis=-1)
    coupling = jnp.where(rows[:, None] > rows[None, :], beta[..., None] * coupling, 0.0)
    right = beta[..., None] * jnp.concatenate([v, k * jnp.exp(decays)], axis=-1)
    solved = lax.linalg.triangular_solve(coupling, right, left_side=True, lower=True, unit_diagonal=True)
    return ChunkTerms(
        values=solved[..., : v.shape[-1]],
        weights=solved[..., v.shape[-1] :],
        scores=scores,
        queries=q * jnp.exp(decays),
        keys=k,
        decays=decays,
    )


def chunk_output(state: jax.Array, terms: ChunkTerms) -> tuple[jax.Array, jax.Array]:
    """(out [..., C, V], u [..., C, V]) of a chunk that starts from state [..., K, V]."""
    update = terms.values - einsum("...ck,...kv->...cv", terms.weights, state)
    out = einsum("...ck,...kv->...cv", terms.queries, state) + einsum(
        "...ij,...jv->...iv", terms.scores, update
    )
    return out, update


def state_after(state: jax.Array, terms: ChunkTerms, update: jax.Array, count: jax.Array | int) -> jax.Array:
    """State after the first `count` (1..C) tokens of a chunk."""
    rows = jnp.arange(terms.keys.shape[-2])[:, None]
    last = jnp.take(terms.decays, count - 1, axis=-2)
    exponent = jnp.where(rows < count, last[..., None, :] - terms.decays, -jnp.inf)
    keys = terms.keys * jnp.exp(exponent)
    return state * jnp.exp(last)[..., None] + einsum("...ck,...cv->...kv", keys, update)


def mask_tokens(valid: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Zero the tokens that are not valid; `valid` covers the leading axes of each array."""
    return tuple(jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - valid.ndim)), x, 0) for x in arrays)


def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    lengths: jax.Array | None,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Rectangular chunk form, parallel over the batch, serial over time; see `kda.kda_chunked`."""
    batch, time, heads = beta.shape
    dtype = accumulation_dtype(q, k, v, log_decay, beta, initial_state)
    arrays: tuple[jax.Array, ...] = (q, k, v, log_decay, beta)
    if lengths is not None:
        arrays = mask_tokens(jnp.arange(time)[None, :] < lengths[:, None], *arrays)
    blocks = max(1, -(-time // (chunk * _CHUNKS_PER_BLOCK)))
    per_block = max(1, -(-time // (chunk * blocks)))
    padding = blocks * per_block * chunk - time

    # [batch, time, H, ...] -> [blocks, chunks, batch, H, C, ...]; the padding has decay 1 and beta 0.
    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(batch, blocks, per_block, chunk, *x.shape[2:])
        return jnp.moveaxis(x, (1, 2, 0, 4, 3), (0, 1, 2, 3, 4))

    def step(state: jax.Array, terms: ChunkTerms) -> tuple[jax.Array, jax.Array]:
        out, update = chunk_output(state, terms)
        return state_after(state, terms, update, chunk), out

    @jax.checkpoint  # a training step keeps one state a block and recomputes the rest
    def block(state: jax.Array, tokens: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        return lax.scan(step, state, chunk_terms(*(x.astype(dtype) for x in tokens)))

    state, out = lax.scan(block, initial_state.astype(dtype), tuple(split(x) for x in arrays))
    out = out.reshape(blocks * per_block, batch, heads, chunk, v.shape[-1])
    out = out.transpose(1, 0, 3, 2, 4).reshape(batch, blocks * per_block * chunk, heads, v.shape[-1])
    return out[:, :time].astype(v.dtype), state


class ChunkTable(NamedTuple):
    """Chunks of a ragged batch; a row's chunk grid starts at its first token. N = T // C + R chunks."""

    row: jax.Array  # [N] row of a chunk, R for an unused one
    start: jax.Array  # [N] its first token on the flat axis
    position: jax.Array  # [N] tokens of the row before it
    length: jax.Array  # [N] its valid tokens
    token_source: jax.Array  # [T] chunk * C + offset of a token, -1 for padding


def chunk_table(cu_seqlens: jax.Array, tokens: int, chunk: int) -> ChunkTable:
    rows = cu_seqlens.shape[0] - 1
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    ends = jnp.cumsum(-(-lengths // chunk))
    first = ends - -(-lengths // chunk)
    ids = jnp.arange(tokens // chunk + rows)
    row = jnp.searchsorted(ends, ids, side="right", method="compare_all")
    inside = jnp.minimum(row, rows - 1)
    position = (ids - first[inside]) * chunk
    count = jnp.where(row < rows, jnp.clip(lengths[inside] - position, 0, chunk), 0)
    token = jnp.arange(tokens)
    token_row = jnp.minimum(
        jnp.searchsorted(cu_seqlens[1:], token, side="right", method="compare_all"), rows - 1
    )
    source = first[token_row] * chunk + token - cu_seqlens[token_row]
    return ChunkTable(
        row=row,
        start=cu_seqlens[inside] + position,
        position=position,
        length=count,
        token_source=jnp.where(token < cu_seqlens[-1], source, -1),
    )


def prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    cu_seqlens: jax.Array,
    checkpoints: jax.Array,
    chunk: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Ragged chunk form: serial over the chunks of all rows; see `kda.kda_prefill`. M may be 0."""
    tokens, heads = beta.shape
    rows = initial_state.shape[0]
    dtype = accumulation_dtype(q, k, v, log_decay, beta, initial_state)
    initial_state = initial_state.astype(dtype)
    snapshots = jnp.zeros(checkpoints.shape + initial_state.shape[1:], dtype)
    if tokens == 0 or rows == 0:
        return jnp.zeros(v.shape, v.dtype), initial_state, snapshots
    table = chunk_table(cu_seqlens, tokens, chunk)
    per_block = min(_CHUNKS_PER_BLOCK, table.row.shape[0])
    padding = -table.row.shape[0] % per_block

    def split(x: jax.Array, fill: int) -> jax.Array:
        return jnp.pad(x, (0, padding), constant_values=fill).reshape(-1, per_block)

    def step(carry: tuple[jax.Array, jax.Array], scanned: Any) -> Any:
        states, snapshots = carry
        terms, row, position, count = scanned
        inside = jnp.minimum(row, rows - 1)
        state = states[inside]
        out, update = chunk_output(state, terms)
        states = states.at[row].set(state_after(state, terms, update, chunk), mode="drop")
        wanted = checkpoints[inside] - position  # tokens of this chunk before each checkpoint
        hit = (row < rows) & (wanted > 0) & (wanted <= count)

        def snapshot(snapshots: jax.Array) -> jax.Array:
            taken = jax.vmap(lambda n: state_after(state, terms, update, n))(jnp.clip(wanted, 1, chunk))
            kept = snapshots[inside]
            return snapshots.at[inside].set(jnp.where(hit[:, None, None, None], taken, kept))

        if checkpoints.shape[1]:
            snapshots = lax.cond(jnp.any(hit), snapshot, lambda kept: kept, snapshots)
        return (states, snapshots), out

    @jax.checkpoint
    def block(carry: tuple[jax.Array, jax.Array], chunks: tuple[jax.Array, ...]) -> Any:
        row, start, position, count = chunks
        offsets = jnp.arange(chunk)
        index = jnp.minimum(start[:, None] + offsets, tokens - 1)
        valid = offsets < count[:, None]
        arrays = mask_tokens(valid, *(x[index] for x in (q, k, v, log_decay, beta)))
        terms = chunk_terms(*(jnp.moveaxis(x, 2, 1).astype(dtype) for x in arrays))
        return lax.scan(step, carry, (terms, row, position, count))

    chunks = (split(table.row, rows), split(table.start, 0), split(table.position, 0), split(table.length, 0))
    (states, snapshots), out = lax.scan(block, (initial_state, snapshots), chunks)
    out = jnp.moveaxis(out, -2, -3).reshape(-1, heads, v.shape[-1])
    out = jnp.where((table.token_source >= 0)[:, None, None], out[jnp.maximum(table.token_source, 0)], 0)
    return out.astype(v.dtype), states, snapshots
