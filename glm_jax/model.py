"""The trunk: embedding, 4-stream hyper-connected layers, final collapse and vocabulary head (MODEL.md M.1).

The trunk knows the order of things and nothing of sequences: each attention layer is a callable that the
caller supplies (whole sequences in `glm_jax.whole_sequence`, cached steps in `glm_jax.paged`). What layers
share is jitted apart, so that it is traced and lowered once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from glm_jax.collectives import embedding_lookup
from glm_jax.config import Config
from glm_jax.layers.mlp import dense_mlp, moe_mlp
from glm_jax.layers.norms import rms_norm
from glm_jax.params import DenseMlp, HyperConnection, Kda, Mla, Moe, Params
from glm_jax.precision import at_least_float32
from glm_jax.quantization import matmul
from pallas_kernels.hyper_connection import (
    hyper_connection_post,
    hyper_connection_post_pre,
    hyper_connection_pre,
)

KdaLayer = Callable[[Kda, int, jax.Array, Any], tuple[jax.Array, Any]]
"""`(parameters, index among KDA layers, hidden [tokens, hidden], state) -> (output, state)`"""

MlaLayer = Callable[[Mla, int, jax.Array, Any, Any], tuple[jax.Array, Any, Any]]
"""`(parameters, index among MLA layers, hidden, selection, state) -> (output, selection, state)`.

The selection of the last full indexer travels on, across KDA layers too, so that shared layers can reuse it.
"""

LayerObserver = Callable[[int, jax.Array], None]
"""Called with the layer's number and its outgoing streams `[tokens, streams, hidden]`."""


def trunk(
    params: Params,
    config: Config,
    tokens: jax.Array,
    kda_layer: KdaLayer,
    mla_layer: MlaLayer,
    state: Any,
    *,
    axis: str | None = None,
    implementation: str | None = None,
    observe: LayerObserver | None = None,
) -> tuple[jax.Array, Any]:
    """Runs all layers over a flat axis: `tokens [tokens]` int32 -> final normed hidden `[tokens, hidden]`.

    The result is what the vocabulary head and the MTP layer read. `state` is threaded through the attention
    callables (a cache, or None).
    """
    embedded = embedding_lookup(params.embed_tokens, tokens, axis)
    streams = jnp.broadcast_to(
        embedded[:, None, :], (embedded.shape[0], config.hc_streams, embedded.shape[1])
    )
    enter = partial(_enter_block, config, implementation)
    leaving: _Leaving | None = None  # a block's output is folded in where the next block is entered
    selection = None
    kda_index = mla_index = 0
    for number, layer in enumerate(params.layers):
        streams, hidden, post, comb = enter(layer.attention_hc, streams, leaving)
        if observe is not None and number > 0:
            observe(number - 1, streams)
        hidden = rms_norm(hidden, layer.input_layernorm, config.rms_norm_eps)
        if isinstance(layer.attention, Kda):
            out, state = kda_layer(layer.attention, kda_index, hidden, state)
            kda_index += 1
        else:
            out, selection, state = mla_layer(layer.attention, mla_index, hidden, selection, state)
            mla_index += 1

        streams, hidden, post, comb = enter(layer.mlp_hc, streams, (out, post, comb))
        hidden = rms_norm(hidden, layer.post_attention_layernorm, config.rms_norm_eps)
        leaving = (run_mlp(layer.mlp, config, hidden, axis, implementation), post, comb)
    if leaving is not None:
        streams = hyper_connection_post(streams, *leaving, implementation=implementation)
    if observe is not None:
        observe(len(params.layers) - 1, streams)
    collapsed = jnp.mean(at_least_float32(streams), axis=1).astype(streams.dtype)
    return rms_norm(collapsed, params.norm, config.rms_norm_eps), state


_Leaving = tuple[jax.Array, jax.Array, jax.Array]
"""A block's output `[tokens, hidden]` and the post and comb weights that take it back into the streams."""


@partial(jax.jit, static_argnums=(0, 1))
def _enter_block(
    config: Config,
    implementation: str | None,
    p: HyperConnection,
    streams: jax.Array,
    leaving: _Leaving | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Leaves the block before, if any, and enters the next: (streams, hidden, post, comb)."""
    options: dict[str, Any] = {
        "norm_eps": config.rms_norm_eps,
        "hc_eps": config.hc_eps,
        "sinkhorn_iterations": config.hc_sinkhorn_iterations,
        "implementation": implementation,
    }
    if leaving is None:
        return streams, *hyper_connection_pre(streams, p.fn, p.base, p.scale, **options)
    return hyper_connection_post_pre(streams, *leaving, p.fn, p.base, p.scale, **options)


@partial(jax.jit, static_argnums=(1, 3, 4))
def run_mlp(
    p: DenseMlp | Moe, config: Config, x: jax.Array, axis: str | None, implementation: str | None
) -> jax.Array:
    """The layer's MLP, dense or mixture of experts: `[tokens, hidden]` both ways."""
    if isinstance(p, DenseMlp):
        return dense_mlp(p, config, x, axis)
    return moe_mlp(p, config, x, axis, implementation)


def vocabulary_logits(params: Params, hidden: jax.Array) -> jax.Array:
    """Raw logits `[..., vocab]`, at least float32, of normed hidden states `[..., hidden]`.

    Under a mesh, of the shard's own part of the vocabulary.
    """
    return at_least_float32(matmul(hidden, params.lm_head))
