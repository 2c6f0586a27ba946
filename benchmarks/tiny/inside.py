"""The library's own forward, with what its attention layers saw handed out beside the logits."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

import glm_jax
import glm_jax.mtp
from glm_jax import whole_sequence
from glm_jax.config import Config
from glm_jax.layers.mla import mla_inputs, mla_output
from glm_jax.model import trunk, vocabulary_logits
from glm_jax.params import Kda, Mla, Params
from pallas_kernels.sparse_mla import dequantize_latents, quantize_latents


class Seen(NamedTuple):
    """What a teacher-forced run shows.

    best [batch, time] and drafts [steps, batch, time] int32: the likeliest tokens, row t for token t + 1 and
    t + 2 + step; log_likelihood [batch, time] of token t + 1; covered [MLA layers, batch, rows]: the share of
    dense attention mass on what was selected, at the rows asked for.
    """

    best: jax.Array
    drafts: jax.Array
    log_likelihood: jax.Array
    covered: jax.Array


@partial(jax.jit, static_argnames=("config", "fp8_latents", "steps"))
def look(
    params: Params,
    config: Config,
    tokens: jax.Array,
    at: jax.Array,
    *,
    fp8_latents: bool = False,
    steps: int = 3,
) -> Seen:
    """Teacher forcing on right-padded rows: tokens [batch, time], at [batch, rows] positions to look at.

    fp8_latents: what attention sees of a token is rounded as an fp8 cache holds it.
    """
    batch, time = tokens.shape
    rows = whole_sequence.Rows(batch, time, jnp.full(batch, time))
    covered: list[jax.Array] = []

    def kda_layer(p: Kda, index: int, x: jax.Array, state: None) -> tuple[jax.Array, None]:
        return whole_sequence.run_kda(p, config, rows, x)[0], state

    def mla_layer(p: Mla, index: int, x: jax.Array, chosen: jax.Array | None, state: None) -> tuple:
        inputs = mla_inputs(p, config, x)
        latent = inputs.latent
        if fp8_latents:
            latent = dequantize_latents(*quantize_latents(latent), latent.dtype)
        if p.indexer is not None:
            chosen = whole_sequence.select(p.indexer, config, rows, x, inputs.query_residual)
        assert chosen is not None, "the configuration's check lets no shared indexer come first"
        query, latents = rows.split(inputs.query), rows.split(latent)
        covered.append(_covered(p, config, query, latents, chosen, at))
        attended = whole_sequence.attend_selected(p, config, query, latents, chosen)
        return mla_output(p, rows.flatten(attended), None), chosen, state

    flat, _ = trunk(params, config, tokens.reshape(-1), kda_layer, mla_layer, None, implementation="xla")
    hidden = rows.split(flat)
    logits = vocabulary_logits(params, hidden)
    following = jnp.roll(tokens, -1, 1)
    likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits), following[..., None], -1)[..., 0]
    if steps:
        drafts = glm_jax.mtp.forward(params, config, tokens, hidden, steps=steps).argmax(-1)
    else:
        drafts = jnp.zeros((0, batch, time), jnp.int32)
    return Seen(logits.argmax(-1), drafts, likelihood, jnp.stack(covered))


def _covered(
    p: Mla, config: Config, query: jax.Array, latents: jax.Array, chosen: jax.Array, at: jax.Array
) -> jax.Array:
    """Dense attention's mass on the selection: mean over heads, [batch, rows]."""
    time = latents.shape[1]
    row = jnp.arange(at.shape[0])[:, None]
    keys = jnp.einsum("bsl,hdl->bshd", latents, p.k_b.astype(latents.dtype))
    scores = jnp.einsum("brhd,bshd->bhrs", query[row, at], keys).astype(jnp.float32)
    causal = jnp.arange(time) <= at[..., None]
    scores = jnp.where(causal[:, None], scores * query.shape[-1] ** -0.5, -jnp.inf)
    mass = jax.nn.softmax(scores, -1).mean(1)
    visible = jax.vmap(
        lambda ids, positions: whole_sequence.visible_tokens(ids[None], positions, time, config.index_kpool)[
            0
        ]
    )(chosen[row, at], at)
    return jnp.where(visible & causal, mass, 0.0).sum(-1)
