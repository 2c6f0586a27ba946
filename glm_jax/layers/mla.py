"""Multi-head latent attention without rope: projections around a latent cache (MODEL.md M.4)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm_jax.collectives import all_reduce
from glm_jax.config import Config
from glm_jax.layers.norms import layer_norm, rms_norm
from glm_jax.params import Indexer, Mla
from glm_jax.precision import at_least_float32
from glm_jax.quantization import matmul

INDEX_KEY_NORM_EPS = 1e-6  # fixed in the reference, unlike rms_norm_eps


class MlaInputs(NamedTuple):
    query: jax.Array  # [tokens, heads, qk_head_dim]
    query_residual: jax.Array  # [tokens, q_lora_rank], the indexer's input
    latent: jax.Array  # [tokens, kv_lora_rank]: what the cache holds, key and value in one


class IndexInputs(NamedTuple):
    query: jax.Array  # [tokens, index_heads, index_head_dim]
    head_weights: jax.Array  # [tokens, index_heads] at least float32, scaled by index_heads ** -0.5
    key: jax.Array  # [tokens, index_head_dim]
    gate: jax.Array  # [tokens, index_head_dim], pooling logits before the slot's bias


def _biased(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias.astype(x.dtype)


def mla_inputs(p: Mla, config: Config, x: jax.Array) -> MlaInputs:
    """Hidden states `[tokens, hidden]` -> queries, the indexer's residual and the latents to cache."""
    eps = config.rms_norm_eps
    residual = rms_norm(_biased(matmul(x, p.q_a_proj), p.q_a_bias), p.q_a_layernorm, eps)
    query = matmul(residual, p.q_b_proj).reshape(x.shape[0], p.k_b.shape[0], -1)
    latent = rms_norm(_biased(matmul(x, p.kv_a_proj), p.kv_a_bias), p.kv_a_layernorm, eps)
    return MlaInputs(query, residual, latent)


def index_inputs(p: Indexer, config: Config, x: jax.Array, query_residual: jax.Array) -> IndexInputs:
    """The indexer's own queries, keys, pooling gates and head weights (MODEL.md M.5)."""
    key = layer_norm(matmul(x, p.wk), p.k_norm_weight, p.k_norm_bias, INDEX_KEY_NORM_EPS)
    query = matmul(query_residual, p.wq_b).reshape(x.shape[0], -1, key.shape[-1])
    heads = query.shape[1]
    return IndexInputs(
        query=query,
        head_weights=at_least_float32(matmul(x, p.weights_proj)) * heads**-0.5,
        key=key,
        gate=matmul(x, p.gate),
    )


def absorb_query(p: Mla, query: jax.Array) -> jax.Array:
    """Folds the key half of kv_b into the query: `[tokens, heads, qk]` -> `[tokens, heads, latent]`."""
    return jnp.einsum("thd,hdl->thl", query, p.k_b.astype(query.dtype), precision=_precision(query))


def expand_value(p: Mla, attended: jax.Array) -> jax.Array:
    """Applies the value half of kv_b to attended latents: `[tokens, heads, latent]` -> `[.., v_head_dim]`."""
    return jnp.einsum("thl,hvl->thv", attended, p.v_b.astype(attended.dtype), precision=_precision(attended))


def mla_output(p: Mla, values: jax.Array, axis: str | None) -> jax.Array:
    """Heads' values `[tokens, heads, v_head_dim]` -> `[tokens, hidden]`; the bias is added after the sum."""
    flat = values.reshape(values.shape[0], -1)
    return _biased(all_reduce(matmul(flat, p.o_proj), axis), p.o_bias)


def _precision(x: jax.Array) -> jax.lax.Precision | None:
    """Float32 and wider contractions are spelled exact; narrower ones keep the matrix units' own path."""
    return jax.lax.Precision.HIGHEST if x.dtype.itemsize >= 4 else None
