"""Sparse MLA in float64: whoever rounds to float32 on the way is found out."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import sparse_mla as op
from tests.pallas_kernels import sparse_oracles as oracle

ROUNDING = 1e-13  # outputs of order 1, sums of tens of products


def test_attention_is_float64():
    random = np.random.default_rng(0)
    q = random.normal(size=(9, 3, 128))
    latents = random.normal(size=(2, 30, 128))
    indices = random.integers(-1, 30, size=(9, 20)).astype(np.int32)
    out = op.sparse_mla(*map(jnp.asarray, (q, latents, indices)), scale=0.3, layer=1, implementation="xla")
    assert out.dtype == jnp.float64
    np.testing.assert_allclose(out, oracle.attention(q, latents[1], indices, 0.3), atol=ROUNDING, rtol=0)


def test_attention_over_float8_is_float64():
    random = np.random.default_rng(1)
    q = random.normal(size=(5, 2, 256))
    latents, scales = op.quantize_latents(jnp.asarray(random.normal(size=(1, 12, 256))))
    indices = random.integers(-1, 12, size=(5, 7)).astype(np.int32)
    out = op.sparse_mla(
        jnp.asarray(q),
        latents,
        jnp.asarray(indices),
        scale=0.3,
        layer=0,
        latent_scales=scales,
        implementation="xla",
    )
    seen = np.asarray(op.dequantize_latents(latents, scales, jnp.float64))
    assert scales.dtype == jnp.float64 and seen.dtype == np.float64
    np.testing.assert_allclose(out, oracle.attention(q, seen[0], indices, 0.3), atol=ROUNDING, rtol=0)
    narrow = op.quantize_latents(jnp.asarray(seen, jnp.float32))
    np.testing.assert_array_equal(op.dequantize_latents(*narrow, jnp.float64), seen)
