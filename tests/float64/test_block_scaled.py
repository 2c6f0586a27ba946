"""Block-scaled matmul in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import block_scaled as op
from tests.pallas_kernels import expert_oracles as oracle


@pytest.mark.parametrize("quantize", [False, True])
def test_matmul_is_float64(quantize: bool):
    random = np.random.default_rng(0)
    x, w = random.normal(size=(9, 200)), random.normal(size=(33, 200))
    values, scales = op.quantize_blocks(jnp.asarray(w))
    out = op.block_scaled_matmul(jnp.asarray(x), values, scales, quantize_activations=quantize)
    assert out.dtype == jnp.float64 and scales.dtype == jnp.float32
    seen = op.round_activations(jnp.asarray(x)) if quantize else x
    assert np.asarray(seen).dtype == np.float64
    expected = oracle.wide(seen) @ oracle.dequantize(values, scales).T
    # Sums of 200 products of order 1
    np.testing.assert_allclose(out, expected, atol=1e-12, rtol=0)


def test_dequantised_values_are_exact_products():
    values, scales = op.quantize_blocks(jnp.asarray(np.random.default_rng(1).normal(size=(130, 140))))
    found = op.dequantize_blocks(values, scales, jnp.float64)
    np.testing.assert_array_equal(found, oracle.dequantize(values, scales))
