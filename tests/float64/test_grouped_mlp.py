"""Routed experts and block-scaled matmul in float64: whoever rounds to float32 on the way is found out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import block_scaled
from pallas_kernels import grouped_mlp as op
from tests.pallas_kernels import expert_oracles as oracle

ROUNDING = 1e-13  # outputs of order 1, two chained sums of tens of products


def problem(experts: int, dim: int = 24, inner: int = 13):
    random = np.random.default_rng(experts)
    ids = np.argsort(random.random((30, experts)), axis=1)[:, :3].astype(np.int32)
    ids[random.random(ids.shape) < 0.3] = -1
    return (
        random.normal(size=(30, dim)),
        ids,
        random.random((30, 3)),
        random.normal(size=(experts, 2, inner, dim)) * dim**-0.5 * 2,
        random.normal(size=(experts, dim, inner)) * inner**-0.5,
    )


@pytest.mark.parametrize("experts", [5, 20])
def test_grouped_mlp_is_float64(experts: int):
    arguments = problem(experts)
    out = op.grouped_mlp(*map(jnp.asarray, arguments), limit=1.0)
    assert out.dtype == jnp.float64
    expected = oracle.grouped_mlp(*arguments, limit=1.0)
    np.testing.assert_allclose(out, expected, atol=ROUNDING * 10, rtol=0)


@pytest.mark.parametrize("experts", [5, 20])
def test_gradients(experts: int):
    """Against central differences: their error is about 1e-10 here."""
    x, ids, weights, gate_up, down = map(jnp.asarray, problem(experts))

    def loss(x, weights, gate_up, down):
        return jnp.sin(op.grouped_mlp(x, ids, weights, gate_up, down, limit=3.0)).sum()

    inputs = (x, weights, gate_up, down)
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*inputs)
    evaluate = jax.jit(loss)
    for index, gradient in enumerate(gradients):
        direction = jax.random.normal(jax.random.key(index), gradient.shape)
        step = 1e-5 / jnp.linalg.norm(direction)
        ends = [
            evaluate(*(v + sign * step * direction if i == index else v for i, v in enumerate(inputs)))
            for sign in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("experts", [5, 20])
def test_float8_weights_are_multiplied_in_float64(experts: int, quantize: bool):
    x, ids, weights, gate_up, down = map(jnp.asarray, problem(experts, 150, 140))
    gate_up, gate_up_scales = block_scaled.quantize_blocks(gate_up)
    down, down_scales = block_scaled.quantize_blocks(down)
    out = op.grouped_mlp(
        x,
        ids,
        weights,
        gate_up,
        down,
        limit=1.0,
        gate_up_scales=gate_up_scales,
        down_scales=down_scales,
        quantize_activations=quantize,
    )
    plain = [
        block_scaled.dequantize_blocks(gate_up, gate_up_scales, jnp.float64),
        block_scaled.dequantize_blocks(down, down_scales, jnp.float64),
    ]
    if quantize:
        # Two float8 roundings: an oracle for them would repeat them; dtype and rough size are what is left.
        expected = oracle.grouped_mlp(x, ids, weights, *plain, limit=1.0)
        assert 1e-3 < np.linalg.norm(out - expected) / np.linalg.norm(expected) < 0.1
    else:
        expected = oracle.grouped_mlp(x, ids, weights, *plain, limit=1.0)
        np.testing.assert_allclose(out, expected, atol=ROUNDING * 10, rtol=0)
    assert out.dtype == jnp.float64
