"""Dense and mixture-of-experts MLPs with the clamped SwiGLU (MODEL.md M.6, M.7)."""

import jax
import jax.numpy as jnp

from glm_jax.collectives import all_reduce
from glm_jax.config import Config
from glm_jax.params import DenseMlp, Moe
from glm_jax.precision import at_least_float32
from glm_jax.quantization import BlockScaled, Weight, matmul
from pallas_kernels.grouped_mlp import grouped_mlp


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """`silu(min(gate, limit)) * clip(up, -limit, limit)`: the gate is clamped above only, before SiLU."""
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


def _part(stacked: Weight, index: int) -> Weight:
    if isinstance(stacked, BlockScaled):
        return BlockScaled(stacked.values[index], stacked.scales[index])
    return stacked[index]


def _dense_partial(p: DenseMlp, x: jax.Array, limit: float) -> jax.Array:
    # two products whether scaled or not: one twice as wide may sum in another order
    gate, up = (matmul(x, _part(p.gate_up, i)) for i in (0, 1))
    return matmul(clamped_swiglu(gate, up, limit), p.down)


def _values_and_scales(weight: jax.Array | BlockScaled) -> tuple[jax.Array, jax.Array | None]:
    return (weight.values, weight.scales) if isinstance(weight, BlockScaled) else (weight, None)


def dense_mlp(p: DenseMlp, config: Config, x: jax.Array, axis: str | None) -> jax.Array:
    """`[tokens, hidden]` -> `[tokens, hidden]`."""
    return all_reduce(_dense_partial(p, x, config.swiglu_limit), axis)


def route(p: Moe, config: Config, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Chosen experts `[tokens, k]` int32 and their weights `[tokens, k]` at least float32.

    Sigmoid scores; the correction bias takes part in the choice only. With expert groups, a group's score
    is the sum of its two best experts and only the best `topk_groups` groups stay. Ties go to the lowest
    index. Weights are the unbiased scores, normalised (sum + 1e-20) when the configuration says so, times
    the routed scaling factor.
    """
    wide = at_least_float32(x)
    logits = jnp.einsum("td,ed->te", wide, p.router.astype(wide.dtype), precision=jax.lax.Precision.HIGHEST)
    scores = jax.nn.sigmoid(logits)
    choice = scores + p.router_bias.astype(scores.dtype)
    groups = config.num_expert_groups
    if groups > 1:
        by_group = choice.reshape(choice.shape[0], groups, -1)
        group_scores = jnp.sum(jax.lax.top_k(by_group, 2)[0], axis=-1)
        kept = jax.lax.top_k(group_scores, config.topk_groups)[1]
        keep = jnp.any(kept[:, :, None] == jnp.arange(groups), axis=1)
        choice = jnp.where(keep[:, :, None], by_group, -jnp.inf).reshape(choice.shape)
    chosen = jax.lax.top_k(choice, config.num_experts_per_token)[1].astype(jnp.int32)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if config.norm_topk_prob:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return chosen, weights * config.routed_scaling_factor


def moe_mlp(
    p: Moe, config: Config, x: jax.Array, axis: str | None, implementation: str | None = None
) -> jax.Array:
    """Routed experts plus the shared expert, one all-reduce for both; `[tokens, hidden]` both ways."""
    chosen, weights = route(p, config, x)
    gate_up, gate_up_scales = _values_and_scales(p.gate_up)
    down, down_scales = _values_and_scales(p.down)
    routed = grouped_mlp(
        x,
        chosen,
        weights,
        gate_up,
        down,
        limit=config.swiglu_limit,
        gate_up_scales=gate_up_scales,
        down_scales=down_scales,
        implementation=implementation,
    )
    return all_reduce(routed + _dense_partial(p.shared, x, config.swiglu_limit), axis)
