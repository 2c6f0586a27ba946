"""The multi-token-prediction layer: a single-stream block that drafts tokens (MODEL.md c).

Row t is fed the token at t + 1 (embedding first) and a hidden state: the target's final normed hidden at
step 0, its own normed output afterwards. `draft` is the cached form the engine uses; `forward` is the
teacher-forced form over whole sequences.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from glm_jax.cache import Cache
from glm_jax.collectives import argmax_last, embedding_lookup
from glm_jax.config import Config
from glm_jax.layers.mla import mla_inputs, mla_output
from glm_jax.layers.norms import rms_norm
from glm_jax.model import run_mlp, vocabulary_logits
from glm_jax.paged import TokenLayout, run_mla
from glm_jax.params import MtpLayer, Params
from glm_jax.quantization import matmul
from glm_jax.rows import align_left, check_mask, check_tokens
from glm_jax.whole_sequence import Rows, attend_selected, select


def require_mtp(params: Params) -> MtpLayer:
    """The MTP layer, or one clear error for a checkpoint without one."""
    if params.mtp is None:
        raise ValueError("this checkpoint has no MTP layer (num_nextn_predict_layers is 0)")
    return params.mtp


def _block(
    params: Params,
    config: Config,
    tokens: jax.Array,
    previous: jax.Array,
    positions: jax.Array,
    attention: Callable[[jax.Array], jax.Array],
    axis: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """One pass over a flat axis: next tokens `[tokens]`, hidden `[tokens, hidden]` -> normed output.

    The embedding of a row at position 0 is zeroed before its norm, as vLLM and ATOM do.
    """
    p = require_mtp(params)
    eps = config.rms_norm_eps
    embedded = embedding_lookup(params.embed_tokens, tokens, axis)
    embedded = jnp.where((positions == 0)[:, None], 0, embedded)
    joined = jnp.concatenate([rms_norm(embedded, p.enorm, eps), rms_norm(previous, p.hnorm, eps)], axis=-1)
    residual = matmul(joined, p.eh_proj)
    residual = residual + attention(rms_norm(residual, p.input_layernorm, eps))
    normed = rms_norm(residual, p.post_attention_layernorm, eps)
    residual = residual + run_mlp(p.mlp, config, normed, axis, implementation)
    return rms_norm(residual, p.norm, eps)


def forward(
    params: Params,
    config: Config,
    tokens: jax.Array,
    hidden: jax.Array,
    mask: jax.Array | None = None,
    steps: int = 3,
) -> jax.Array:
    """Teacher-forced draft logits `[steps, batch, time, vocab]`, float32 or wider.

    At step s, row t is fed token t + 1 + s, so its logits are for token t + 2 + s; rows that run past
    their sequence's end, and padding, are unspecified but finite. `tokens [batch, time]` int32; `hidden
    [batch, time, hidden]` is the target's final normed hidden (`glm_jax.model_states`); `mask` as for
    `glm_jax.forward`. Steps after the first reuse step 0's selection and attend step 0's latents.

    ValueError for several steps of a model with `index_share_for_mtp_iteration` false: its later steps
    depend on one another's index keys, so they run only through the cached form.
    """
    require_mtp(params)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if steps > 1 and not config.index_share_for_mtp_iteration:
        raise ValueError(
            "index_share_for_mtp_iteration is false: teacher-forced drafting supports steps=1, "
            f"got steps={steps}; use the engine for chained drafts"
        )
    check_tokens(tokens, config)
    check_mask(mask, tokens)
    return _forward(params, config, tokens, hidden, mask, steps)


@partial(jax.jit, static_argnums=(1, 5))
def _forward(
    params: Params, config: Config, tokens: jax.Array, hidden: jax.Array, mask: jax.Array | None, steps: int
) -> jax.Array:
    aligned = align_left(tokens, mask)
    batch, time = tokens.shape
    rows = Rows(batch, time, aligned.lengths)
    previous = rows.flatten(aligned.apply(hidden))
    positions = jnp.tile(jnp.arange(time, dtype=jnp.int32), batch)
    p = require_mtp(params).attention
    indexer = p.indexer
    if indexer is None:
        raise ValueError("the MTP layer has no indexer of its own")
    latents: jax.Array | None = None
    selection: jax.Array | None = None
    outputs = []
    for step in range(steps):

        def attention(x: jax.Array) -> jax.Array:
            nonlocal latents, selection
            inputs = mla_inputs(p, config, x)
            if latents is None or selection is None:
                latents = rows.split(inputs.latent)
                selection = select(indexer, config, rows, x, inputs.query_residual)
            attended = attend_selected(p, config, rows.split(inputs.query), latents, selection)
            return mla_output(p, rows.flatten(attended), None)

        fed = jnp.roll(aligned.tokens, -1 - step, axis=1).reshape(-1)
        previous = _block(params, config, fed, previous, positions + step, attention)
        outputs.append(aligned.restore(vocabulary_logits(params, rows.split(previous))))
    return jnp.stack(outputs)


def draft(
    params: Params,
    config: Config,
    cache: Cache,
    layout: TokenLayout,
    next_tokens: jax.Array,
    hidden: jax.Array,
    last_token: jax.Array,
    limits: jax.Array,
    *,
    axis: str | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Cache]:
    """Writes the MTP rows of committed tokens and drafts the next: (drafts `[rows, window - 1]`, cache).

    `layout` holds the committed tokens of this step (others -1), `next_tokens [tokens]` what follows
    each, `hidden [tokens, hidden]` the target's. `last_token [rows]` is the flat index of the row's last
    committed token, -1 for rows that draft nothing (their drafts are unspecified). Drafts at positions
    `>= limits [rows]` write nothing.
    """
    layer = config.layer_kinds.count("mla")
    p = require_mtp(params).attention
    selection = None

    def attention(layout: TokenLayout, reuse: bool, x: jax.Array) -> jax.Array:
        nonlocal cache, selection
        out, selection, cache = run_mla(
            p,
            config,
            cache,
            layer,
            layout,
            x,
            selection,
            reuse_selection=reuse,
            axis=axis,
            implementation=implementation,
        )
        return out

    out = _block(
        params,
        config,
        next_tokens,
        hidden,
        layout.positions,
        partial(attention, layout, False),
        axis,
        implementation,
    )
    drafts = cache.window - 1
    rows = jnp.arange(last_token.shape[0], dtype=jnp.int32)
    at = jnp.maximum(last_token, 0)
    previous, positions = out[at], layout.positions[at]
    selection = None if selection is None else selection[at]
    tokens: list[jax.Array] = []
    for step in range(drafts):
        if step > 0:
            positions = positions + 1
            active = (last_token >= 0) & (positions < limits)
            chained = replace(
                layout, row_of_token=jnp.where(active, rows, -1), positions=positions, row_starts=positions
            )
            previous = _block(
                params,
                config,
                tokens[-1],
                previous,
                positions,
                partial(attention, chained, config.index_share_for_mtp_iteration),
                axis,
                implementation,
            )
        tokens.append(argmax_last(vocabulary_logits(params, previous), axis))
    stacked = jnp.stack(tokens, axis=1) if tokens else jnp.zeros((rows.shape[0], 0), jnp.int32)
    return stacked, cache
