"""The training forward: trunk, MTP chain and the loss over both and the indexers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.tiny.attention import Pools, Selection, attend, mla, queries
from benchmarks.tiny.data import ANSWER, LOOKAHEAD, PADDING, RECALLED
from benchmarks.tiny.layers import (
    hyper_connection_in,
    hyper_connection_out,
    kda,
    matmul,
    moe,
    rms_norm,
    swiglu,
)
from benchmarks.tiny.parameters import Params
from benchmarks.tiny.shape import MLA_PERIOD, Shape

MTP_STEPS = 3
CLASS_WEIGHTS = (
    0.0,
    0.01,
    0.1,
    1.0,
    1.0,
)  # padding, listed, context, answer, recalled: only answers can be known


class Weights(NamedTuple):
    """Weights of the loss terms beside the next token's."""

    mtp: jax.Array | float = 0.3
    indexer: jax.Array | float = 0.5


class Inside(NamedTuple):
    """divergence, covered [MLA layers, batch, time]; chosen [layers, batch, time, experts] bool."""

    divergence: jax.Array
    covered: jax.Array
    chosen: jax.Array


def _stack(params: Params, *prefixes: str) -> Params:
    return {name: value for name, value in params.items() if name.startswith(prefixes)}


def trunk(params: Params, tokens: jax.Array, pools: Pools, s: Shape) -> tuple[jax.Array, Inside]:
    """Post-norm hidden [batch, time, hidden] of int32 tokens [batch, time], and what the layers did."""
    groups, per_layer = s.groups, _stack(params, "hc.", "layer_norm", "moe.", "shared.")
    layers = {k: v[: s.num_layers].reshape(groups, MLA_PERIOD, *v.shape[1:]) for k, v in per_layer.items()}
    kdas = {k: v.reshape(groups, MLA_PERIOD - 1, *v.shape[1:]) for k, v in _stack(params, "kda.").items()}
    mlas = {k: v[:groups] for k, v in _stack(params, "mla.", "index.").items()}

    def attention_input(streams: jax.Array, p: Params) -> tuple[jax.Array, jax.Array, jax.Array]:
        hidden, post, comb = hyper_connection_in(streams, p, 0, s)
        return rms_norm(hidden, p["layer_norm"][0], s.rms_norm_eps), post, comb

    def mlp(streams: jax.Array, p: Params, is_dense: jax.Array | bool) -> tuple[jax.Array, jax.Array]:
        hidden, post, comb = hyper_connection_in(streams, p, 1, s)
        hidden = rms_norm(hidden, p["layer_norm"][1], s.rms_norm_eps)

        def dense(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = swiglu(x, params["dense.gate"], params["dense.up"], params["dense.down"], s.swiglu_limit)
            return out, jnp.zeros((*x.shape[:2], s.num_experts), bool)

        if is_dense is False:
            out, chosen = moe(hidden, p, s)
        else:
            out, chosen = lax.cond(is_dense, dense, lambda x: moe(x, p, s), hidden)
        return hyper_connection_out(streams, post, comb, out), chosen

    @jax.checkpoint
    def kda_layer(streams: jax.Array, xs: tuple[Params, Params, jax.Array]) -> tuple[jax.Array, jax.Array]:
        p, attention, is_dense = xs
        hidden, post, comb = attention_input(streams, p)
        streams = hyper_connection_out(streams, post, comb, kda(hidden, attention, s))
        return mlp(streams, p, is_dense)

    @jax.checkpoint
    def mla_layer(
        streams: jax.Array, p: Params, attention: Params
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        hidden, post, comb = attention_input(streams, p)
        out, selection = mla(hidden, attention, pools, s)
        streams, chosen = mlp(hyper_connection_out(streams, post, comb, out), p, False)
        return streams, (chosen, selection.divergence, selection.covered)

    def group(streams: jax.Array, xs: tuple[Params, Params, Params, jax.Array]) -> tuple[jax.Array, tuple]:
        p, kda_params, mla_params, number = xs
        head, last = MLA_PERIOD - 1, {k: v[MLA_PERIOD - 1] for k, v in p.items()}
        is_dense = (number == 0) & (jnp.arange(head) == 0)
        streams, chosen = lax.scan(
            kda_layer, streams, ({k: v[:head] for k, v in p.items()}, kda_params, is_dense)
        )
        streams, (chosen_last, divergence, covered) = mla_layer(streams, last, mla_params)
        return streams, (jnp.concatenate([chosen, chosen_last[None]]), divergence, covered)

    embedded = params["embed"][tokens].astype(s.compute_dtype)
    streams = jnp.broadcast_to(embedded[:, :, None], (*tokens.shape, s.hc_streams, s.hidden_size))
    streams, (chosen, divergence, covered) = lax.scan(
        group, streams, (layers, kdas, mlas, jnp.arange(groups))
    )
    mean = streams.astype(jnp.float32).mean(2).astype(streams.dtype)
    hidden = rms_norm(mean, params["norm"], s.rms_norm_eps)
    return hidden, Inside(divergence, covered, chosen.reshape(s.num_layers, *chosen.shape[2:]))


def mtp_chain(
    params: Params, hidden: jax.Array, tokens: jax.Array, pools: Pools, s: Shape
) -> tuple[jax.Array, Inside]:
    """Hidden states [steps, batch, time, hidden] of the chained MTP layer, teacher-forced.

    Row r of step j predicts token r + 2 by the chain that began at row r - j: it takes step j - 1's output
    of row r - 1, and the selection of row r - j, whose keys are those of step 0 (MODEL.md c: later steps
    neither choose anew nor add keys that the selection could hold).
    """
    attention = {k: v[s.groups] for k, v in _stack(params, "mla.", "index.").items()}
    mlp = {k: v[s.num_layers] for k, v in _stack(params, "moe.", "shared.").items()}
    norm = params["mtp.layer_norm"]
    following = jnp.concatenate([tokens[:, 1:], jnp.zeros_like(tokens[:, :1])], 1)
    embedded = params["embed"][following].astype(hidden.dtype)
    # a row at position 0 is zeroed before its norm
    embedded = embedded * (jnp.arange(tokens.shape[1]) > 0)[None, :, None].astype(hidden.dtype)
    embedded = rms_norm(embedded, params["mtp.e_norm"], s.rms_norm_eps)

    def enter(previous: jax.Array) -> tuple[jax.Array, jax.Array]:
        previous = rms_norm(previous, params["mtp.h_norm"], s.rms_norm_eps)
        u = matmul(jnp.concatenate([embedded, previous], -1), params["mtp.eh"])
        return u, rms_norm(u, norm[0], s.rms_norm_eps)

    def leave(a: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, chosen = moe(rms_norm(a, norm[1], s.rms_norm_eps), mlp, s)
        return rms_norm(a + out, params["mtp.norm"], s.rms_norm_eps), chosen

    @jax.checkpoint
    def first(previous: jax.Array) -> tuple[jax.Array, Selection, jax.Array]:
        u, x = enter(previous)
        out, selection = mla(x, attention, pools, s)
        y, chosen = leave(u + out)
        return y, selection, chosen

    @jax.checkpoint
    def later(y: jax.Array, mask: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        u, x = enter(y)
        out, _, _ = attend(queries(x, attention, s)[1], keys, values, mask)
        return leave(u + matmul(out, attention["mla.o"]))[0]

    def shift(x: jax.Array) -> jax.Array:
        return jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], 1)

    y, selection, chosen = first(hidden)

    def step(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        y, mask = shift(carry[0]), shift(carry[1])
        y = later(y, mask, selection.keys, selection.values)
        return (y, mask), y

    _, more = lax.scan(step, (y, selection.mask), None, length=MTP_STEPS - 1)
    inside = Inside(selection.divergence[None], selection.covered[None], chosen[None])
    return jnp.concatenate([y[None], more]), inside


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """float32 logits [..., vocab] of post-norm hidden states."""
    return jnp.einsum(
        "...d,vd->...v", hidden, params["head"].astype(hidden.dtype), preferred_element_type=jnp.float32
    )


@jax.checkpoint
def cross_entropy(
    head: jax.Array, hidden: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Weighted mean negative log likelihood, and where the best token is the target."""
    scores = logits({"head": head}, hidden)
    right = jnp.take_along_axis(scores, targets[..., None], -1)[..., 0]
    losses = jax.nn.logsumexp(scores, -1) - right
    hit = lax.stop_gradient(scores.argmax(-1) == targets)
    return (losses * weights).sum() / (weights.sum() + 1e-6), hit


def loss(
    params: Params, ids: jax.Array, classes: jax.Array, pools: Pools, weights: Weights, s: Shape
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Training loss and metrics of a batch of `data.Encoder`: ids, classes [rows, length + LOOKAHEAD]."""
    length = ids.shape[1] - LOOKAHEAD
    ids = ids.astype(jnp.int32)
    token_weights = jnp.asarray(CLASS_WEIGHTS)[classes.astype(jnp.int32)]
    tokens, valid = ids[:, :length], classes[:, :length] != PADDING
    hidden, inside = trunk(params, tokens, pools, s)
    main, hit = cross_entropy(
        params["head"], hidden, ids[:, 1 : length + 1], token_weights[:, 1 : length + 1]
    )
    chain, chain_inside = mtp_chain(params, hidden, tokens, pools, s)
    row = jnp.arange(length)

    def chained(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        y, j = args
        return cross_entropy(
            params["head"], y, ids[:, 2 : length + 2], token_weights[:, 2 : length + 2] * (row >= j)
        )[0]

    mtp = lax.map(chained, (chain, jnp.arange(MTP_STEPS)))
    divergence = jnp.concatenate([inside.divergence, chain_inside.divergence])
    index_weights = (token_weights[:, 1 : length + 1] + 0.02) * valid
    indexer = (divergence * index_weights).sum() / index_weights.sum()
    next_class = classes[:, 1 : length + 1]
    answered = next_class >= ANSWER
    chosen = jnp.concatenate([inside.chosen, chain_inside.chosen])
    metrics = {
        "next_token": main,
        "mtp": mtp,
        "indexer": indexer,
        "covered": _mean(jnp.concatenate([inside.covered, chain_inside.covered]), answered),
        "answers": _mean(hit, next_class == ANSWER),
        "recall": _mean(hit, next_class == RECALLED),
        "load": _mean(jnp.moveaxis(chosen, -1, 1), valid) / s.experts_per_token,
    }
    return main + weights.mtp * mtp.mean() + weights.indexer * indexer, metrics


def _mean(values: jax.Array, where: jax.Array) -> jax.Array:
    """Mean over the two last axes where `where` [batch, time] holds."""
    return (values * where).sum((-1, -2)) / jnp.maximum(where.sum(), 1)
