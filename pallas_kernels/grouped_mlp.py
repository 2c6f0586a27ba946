"""The routed experts of a mixture: every token through its own k experts, each a clamped SwiGLU.

    E(x) = down . (silu(min(gate . x, limit)) * clip(up . x, -limit, limit))
    out[t] = sum over the k chosen experts of weight * E(x[t])

Rounding order in a narrow compute dtype: gate, up and their activation are rounded to it, so is every
expert's output; the weighted sum over k is taken in at least float32 and rounded once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import resolve
from pallas_kernels.expert_tiles import expert_tiles
from pallas_kernels.float8_blocks import dequantize_blocks, round_activations
from pallas_kernels.grouped_mlp_kernel import grouped_mlp_triton, supports
from pallas_kernels.swiglu import clamped_swiglu

_HIGHEST = jax.lax.Precision.HIGHEST
# With few experts, running every one of them on all tokens costs a small factor in arithmetic and needs
# neither a sort nor a scatter, forward or backward; with more, tokens are sorted into tiles of one expert.
_DENSE_EXPERTS = 16
_LARGEST_TILE = 128

Weight = tuple[jax.Array, jax.Array | None]  # values and their scales, None for a plain weight
_Expert = Callable[[jax.Array, Weight, Weight], jax.Array]


def grouped_mlp(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    limit: float,
    gate_up_scales: jax.Array | None = None,
    down_scales: jax.Array | None = None,
    quantize_activations: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """The weighted sum of every token's experts.

    x: [tokens, dim]; expert_ids: [tokens, k] int32, -1 for none (a token without any gets zeros, whatever
    its x holds); expert_weights: [tokens, k], at least float32; gate_up: [experts, 2, inner, dim], gate then
    up; down: [experts, dim, inner]. Both weights in the compute dtype, or float8_e4m3fn with scales
    [experts, 2, ceil(inner / 128), ceil(dim / 128)] and [experts, ceil(dim / 128), ceil(inner / 128)].
    quantize_activations: round the input of either product to float8 per token and 128 channels first.
    Returns [tokens, dim] in x.dtype. A token's result does not depend on other tokens.
    """
    weights = (gate_up, gate_up_scales), (down, down_scales)
    _check(x, expert_ids, expert_weights, *weights, quantize_activations)
    chosen = resolve(implementation, supported=supports(x, *weights))
    options: dict[str, Any] = {"limit": limit, "quantize_activations": quantize_activations}
    if chosen == "xla":
        return grouped_mlp_reference(x, expert_ids, expert_weights, *weights, **options)
    interpret = chosen == "interpret"
    return grouped_mlp_triton(x, expert_ids, expert_weights, *weights, **options, interpret=interpret)


def grouped_mlp_reference(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    gate_up: Weight,
    down: Weight,
    *,
    limit: float,
    quantize_activations: bool,
) -> jax.Array:
    """`grouped_mlp` in plain XLA; differentiable with plain weights."""
    expert = partial(_expert, limit=limit, quantize_activations=quantize_activations)
    compute = _every_expert if gate_up[0].shape[0] <= _DENSE_EXPERTS else _sorted_tiles
    return compute(x, expert_ids, expert_weights, gate_up, down, expert).astype(x.dtype)


def _every_expert(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    gate_up: Weight,
    down: Weight,
    expert: _Expert,
) -> jax.Array:
    """Every expert on all tokens, one after the other; [tokens, dim] in the accumulation dtype."""
    accumulate = jnp.promote_types(x.dtype, jnp.float32)

    @jax.checkpoint
    def contribution(index: jax.Array, gate_up: Weight, down: Weight) -> jax.Array:
        chosen = expert_ids == index
        weight = jnp.where(chosen, expert_weights.astype(accumulate), 0).sum(axis=-1, keepdims=True)
        weighted = weight * expert(x, gate_up, down).astype(accumulate)
        return jnp.where(chosen.any(axis=-1, keepdims=True), weighted, 0)

    def step(total: jax.Array, inputs: tuple[jax.Array, Weight, Weight]) -> tuple[jax.Array, None]:
        return total + contribution(*inputs), None

    experts = jnp.arange(gate_up[0].shape[0], dtype=expert_ids.dtype)
    return jax.lax.scan(step, jnp.zeros(x.shape, accumulate), (experts, gate_up, down))[0]


def _sorted_tiles(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    gate_up: Weight,
    down: Weight,
    expert: _Expert,
) -> jax.Array:
    """Token choices sorted into tiles of one expert each; [tokens, dim] in the accumulation dtype."""
    tokens, k = expert_ids.shape
    experts = gate_up[0].shape[0]
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    tile = min(_LARGEST_TILE, max(8, 1 << (tokens * k // experts).bit_length()))
    tiles = expert_tiles(expert_ids.reshape(-1), experts, tile)

    def step(outputs: jax.Array, tile_inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        index, source = tile_inputs
        weights = jax.tree.map(lambda w: w[jnp.maximum(index, 0)], (gate_up, down))
        rows = x.at[source // k].get(mode="fill", fill_value=0)
        # Every choice is written once; padding, one past the end, is dropped.
        return outputs.at[source].set(expert(rows, *weights), mode="drop"), None

    outputs = jnp.zeros((tokens * k, x.shape[1]), x.dtype)
    outputs = jax.lax.scan(step, outputs, (tiles.experts, tiles.sources.reshape(-1, tile)))[0]
    weights = jnp.where(expert_ids >= 0, expert_weights.astype(accumulate), 0)
    return (outputs.reshape(tokens, k, -1).astype(accumulate) * weights[..., None]).sum(axis=1)


def _expert(
    x: jax.Array, gate_up: Weight, down: Weight, *, limit: float, quantize_activations: bool
) -> jax.Array:
    """One expert on rows [rows, dim]; returns [rows, dim] in x.dtype."""
    accumulate = jnp.promote_types(x.dtype, jnp.float32)

    def product(rows: jax.Array, values: jax.Array, scales: jax.Array | None) -> jax.Array:
        if quantize_activations:
            rows = round_activations(rows)
        elif scales is not None:
            rows = rows.astype(accumulate)
        if scales is None:
            w = values
        else:
            # fused into the product, the dequantisation would change its order of sums
            w = jax.lax.optimization_barrier(dequantize_blocks(values, scales, accumulate))
        out = jnp.einsum("tc,...oc->...to", rows, w, precision=_HIGHEST, preferred_element_type=accumulate)
        return out.astype(x.dtype)

    gate, up = product(x, *gate_up)
    return product(clamped_swiglu(gate, up, limit), *down)


def _check(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    gate_up: Weight,
    down: Weight,
    quantize_activations: bool,
) -> None:
    if x.ndim != 2 or expert_ids.shape != expert_weights.shape or expert_ids.shape[0] != x.shape[0]:
        raise ValueError(
            "grouped_mlp takes x [tokens, dim] and expert_ids, expert_weights [tokens, k]; "
            f"got {x.shape}, {expert_ids.shape}, {expert_weights.shape}"
        )
    experts, halves, inner, dim = gate_up[0].shape
    if halves != 2 or dim != x.shape[1] or down[0].shape != (experts, dim, inner):
        raise ValueError(
            f"weights gate_up {gate_up[0].shape} and down {down[0].shape} are not "
            f"[experts, 2, inner, {x.shape[1]}] and [experts, {x.shape[1]}, inner]"
        )
    if (gate_up[1] is None) != (down[1] is None):
        raise ValueError("gate_up_scales and down_scales go together")
    if quantize_activations and gate_up[1] is None:
        raise ValueError("quantize_activations needs float8 weights with scales")
