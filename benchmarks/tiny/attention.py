"""Sparse multi-head latent attention of the training forward, with the indexer's loss beside it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.tiny.layers import MASKED, matmul, rms_norm
from benchmarks.tiny.parameters import Params
from benchmarks.tiny.shape import Shape

Pools = (
    jax.Array | int | None
)  # pools a query may choose: [batch] int32, one static number, or None for dense


class Selection(NamedTuple):
    """What the MTP chain reuses and what the indexer learns from.

    mask [batch, queries, keys] bool; keys, values [batch, time, heads, dim]; divergence and covered
    [batch, time]: KL of the indexer's distribution over pools from the attention's, and the share of
    attention mass selected.
    """

    mask: jax.Array
    keys: jax.Array
    values: jax.Array
    divergence: jax.Array
    covered: jax.Array


def mla(x: jax.Array, p: Params, pools: Pools, s: Shape) -> tuple[jax.Array, Selection]:
    """[batch, time, hidden] -> the same, and the selection. time is a multiple of index_kpool."""
    batch, time, _ = x.shape
    q_latent, q = queries(x, p, s)
    latent = rms_norm(matmul(x, p["mla.kv_a"]), p["mla.kv_norm"], s.rms_norm_eps)
    kv = matmul(latent, p["mla.kv_b"]).reshape(batch, time, s.num_heads, s.qk_head_dim + s.v_head_dim)
    k, v = kv[..., : s.qk_head_dim], kv[..., s.qk_head_dim :]
    scores = pool_scores(lax.stop_gradient(x), lax.stop_gradient(q_latent), p, s)
    position = jnp.arange(time)
    causal = (position[None] <= position[:, None])[None]
    closed = (jnp.arange(time // s.index_kpool) * s.index_kpool + s.index_kpool - 1)[None] <= position[
        :, None
    ]
    mask = causal if pools is None else selected(scores, closed, pools, s.index_kpool) & causal
    out, logits, probabilities = attend(q, k, v, mask)
    whole = probabilities if pools is None else jax.nn.softmax(jnp.where(causal[:, None], logits, MASKED), -1)
    dense = lax.stop_gradient(whole).sum(1)
    target = jnp.where(closed, dense.reshape(batch, time, -1, s.index_kpool).sum(-1), 0.0)
    target = target / (target.sum(-1, keepdims=True) + 1e-9)
    log_index = jax.nn.log_softmax(jnp.where(closed, scores, MASKED), -1)
    divergence = jnp.where(closed, target * (jnp.log(target + 1e-9) - log_index), 0.0).sum(-1)
    covered = jnp.where(mask, dense, 0.0).sum(-1) / s.num_heads
    mask = jnp.broadcast_to(mask, (batch, time, time))
    return matmul(out, p["mla.o"]), Selection(mask, k, v, divergence, covered)


def queries(x: jax.Array, p: Params, s: Shape) -> tuple[jax.Array, jax.Array]:
    """Query latent [batch, time, q_lora_rank] and queries [batch, time, heads, qk_head_dim]."""
    latent = rms_norm(matmul(x, p["mla.q_a"]), p["mla.q_norm"], s.rms_norm_eps)
    return latent, matmul(latent, p["mla.q_b"]).reshape(*x.shape[:2], s.num_heads, s.qk_head_dim)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output [batch, time, heads * v], logits and probabilities [batch, heads, queries, keys] float32."""
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    probabilities = jax.nn.softmax(jnp.where(mask[:, None], logits, MASKED), -1)
    out = jnp.einsum("bhqk,bkhd->bqhd", probabilities.astype(v.dtype), v)
    return out.reshape(*q.shape[:2], -1), logits, probabilities


def pool_scores(x: jax.Array, q_latent: jax.Array, p: Params, s: Shape) -> jax.Array:
    """The indexer's scores [batch, queries, pools] float32."""
    batch, time, _ = x.shape
    q = matmul(q_latent, p["index.q"]).reshape(batch, time, s.index_heads, s.index_head_dim)
    k = matmul(x, p["index.k"]).astype(jnp.float32)
    k = (k - k.mean(-1, keepdims=True)) * lax.rsqrt(k.var(-1, keepdims=True) + 1e-6)
    k = k * p["index.k_norm"] + p["index.k_bias"]
    slots = (batch, time // s.index_kpool, s.index_kpool, s.index_head_dim)
    gates = matmul(x, p["index.gate"]).astype(jnp.float32).reshape(slots)
    pooled = (jax.nn.softmax(gates + p["index.ape"], 2) * k.reshape(slots)).sum(2)
    weights = matmul(x, p["index.weights"]).astype(jnp.float32) * s.index_heads**-0.5
    dots = jnp.einsum("bshd,bpd->bshp", q, pooled.astype(q.dtype), preferred_element_type=jnp.float32)
    return (jax.nn.relu(dots * s.index_head_dim**-0.5) * weights[..., None]).sum(2)


def selected(scores: jax.Array, closed: jax.Array, pools: jax.Array | int, kpool: int) -> jax.Array:
    """Tokens [batch, queries, keys] of each query's best pools, and the tail of its open pool.

    An int selects exactly as served, ties to the lowest index. A number per row is found by bisection on the
    score, which takes a few pools more when scores lie closer than it resolves; training does not mind.
    """
    scores = lax.stop_gradient(scores)
    if isinstance(pools, int):
        batch, time, total = scores.shape
        ids = lax.top_k(jnp.where(closed, scores, MASKED), min(pools, total))[1]
        rows, columns = jnp.arange(batch)[:, None, None], jnp.arange(time)[None, :, None]
        best = jnp.zeros(scores.shape, bool).at[rows, columns, ids].set(True) & closed
    else:
        low = jnp.where(closed, scores, jnp.inf).min(-1)
        high = jnp.where(closed, scores, -jnp.inf).max(-1) + 1e-3

        def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = bounds
            middle = (low + high) / 2
            enough = ((scores >= middle[..., None]) & closed).sum(-1) >= pools[:, None]
            return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

        bounds = (jnp.where(jnp.isfinite(low), low, 0.0), jnp.where(jnp.isfinite(high), high, 1.0))
        threshold = lax.fori_loop(0, 24, halve, bounds)[0]
        best = (scores >= threshold[..., None]) & closed
    position = jnp.arange(closed.shape[0])
    tail = position[None] >= ((position + 1) // kpool * kpool)[:, None]
    return jnp.repeat(best, kpool, -1) | tail
