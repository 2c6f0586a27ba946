"""The sparse MLA kernel on a GPU, or in the Pallas interpreter, against numpy in float64; lowering."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import sparse_mla as op
from pallas_kernels import sparse_mla_kernel as kernel
from pallas_kernels import triton
from tests.pallas_kernels import sparse_oracles as oracle
from tests.pallas_kernels.device import INTERPRET, KERNEL
from tests.pallas_kernels.lowering import lower
from tests.pallas_kernels.test_sparse_mla import problem

FLOAT32_TOLERANCE = 2e-5  # of outputs of order 1: sums of a few dozen float32 products
# Weights and latents round to bfloat16's 8 bits before the second product, outputs of order 1 once more.
BFLOAT16_TOLERANCE = 1.5e-2


def run(
    q, latents, indices, *, splits: int = 1, heads: int = 16, keys: int = 16, layer: int = 1, scales=None
):
    tiles = kernel.Tiles(heads, keys, splits, triton.Launch())
    call = jax.jit(
        lambda layer, *arrays: kernel.sparse_mla(
            *arrays[:3], 0.2, layer, *arrays[3:], interpret=INTERPRET, tiles=tiles
        )
    )
    return np.asarray(call(layer, *map(jnp.asarray, (q, latents, indices)), scales), np.float32)


@pytest.mark.parametrize(("heads", "block", "splits"), [(3, 3, 1), (16, 16, 8), (24, 16, 2)])
def test_matches_numpy(heads: int, block: int, splits: int):
    """Unused rows are NaN; queries without an index, with one, with an odd number of them."""
    q, latents, indices = problem(heads + splits, 5, heads, 128, 60, 37)
    for layer in (0, 2):
        out = run(q, latents, indices, splits=splits, heads=block, layer=layer)
        expected = oracle.attention(q, latents[layer], indices, 0.2)
        np.testing.assert_allclose(out, expected, atol=FLOAT32_TOLERANCE, rtol=0)
    assert not out[0].any()


def test_bfloat16():
    q, latents, indices = problem(1, 6, 16, 256, 80, 50)
    q, latents = jnp.asarray(q, jnp.bfloat16), jnp.asarray(latents, jnp.bfloat16)
    seen = np.asarray(latents[1].astype(jnp.float32))
    expected = oracle.attention(np.asarray(q.astype(jnp.float32)), seen, indices, 0.2)
    for splits in (1, 4):
        np.testing.assert_allclose(
            run(q, latents, indices, splits=splits), expected, atol=BFLOAT16_TOLERANCE, rtol=0
        )


@pytest.mark.parametrize("splits", [1, 4])
def test_quantised_latents(splits: int):
    q, latents, indices = problem(2, 5, 8, 256, 40, 21)
    quantized, scales = op.quantize_latents(jnp.asarray(latents))
    q = jnp.asarray(q, jnp.bfloat16)
    seen = np.asarray(op.dequantize_latents(quantized, scales, jnp.float32))
    expected = oracle.attention(np.asarray(q.astype(jnp.float32)), seen[1], indices, 0.2)
    out = run(q, quantized, indices, splits=splits, heads=8, scales=scales)
    np.testing.assert_allclose(out, expected, atol=BFLOAT16_TOLERANCE, rtol=0)


@pytest.mark.parametrize("rocm", [False, True])
def test_every_float8_number(rocm: bool):
    """A single row is its own average: both ways of widening give each of the 254 numbers exactly."""
    codes = np.arange(256, dtype=np.uint8)
    codes[[0x7F, 0xFF]] = 0  # the NaNs
    latents = jnp.asarray(codes.view(jnp.float8_e4m3fn)).reshape(1, 1, 256)
    scales = jnp.asarray([[[2.0**-20, 2.0**7]]], jnp.float32)
    q, indices = jnp.zeros((1, 16, 256), jnp.bfloat16), jnp.asarray([[0, -1]], jnp.int32)
    tiles = kernel.Tiles(16, 16, 1, triton.Launch(), rocm=rocm)
    out = kernel.sparse_mla(q, latents, indices, 1.0, 0, scales, interpret=INTERPRET, tiles=tiles)
    expected = np.asarray(latents, np.float32)[0, 0] * np.repeat(np.asarray(scales)[0, 0], 128)
    np.testing.assert_array_equal(np.asarray(out[0, 0], np.float32), expected)


def test_public_op_and_reference_agree():
    q, latents, indices = (jnp.asarray(x) for x in problem(3, 4, 8, 128, 30, 19))
    outs = [
        op.sparse_mla(q, latents, indices, scale=0.3, layer=2, implementation=name)
        for name in (KERNEL, "xla")
    ]
    np.testing.assert_allclose(*outs, atol=FLOAT32_TOLERANCE, rtol=0)


def test_later_queries_change_nothing():
    """Bit-equal: a query's program reads its own indices and nothing of its neighbours."""
    q, latents, indices = problem(4, 6, 16, 128, 50, 20)
    whole = run(q, np.nan_to_num(latents), indices)
    q[4:], indices[4:] = 7, 3
    np.testing.assert_array_equal(run(q, np.nan_to_num(latents), indices)[:4], whole[:4])


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize(("tokens", "heads"), [(4096, 64), (32, 64), (1, 8), (300, 24)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_lowers(platform: str, tokens: int, heads: int, dtype: jnp.dtype):
    shapes = [((tokens, heads, 512), jnp.bfloat16), ((12, 8192, 512), dtype), ((tokens, 2051), jnp.int32)]
    shapes += [((), jnp.int32)] + ([((12, 8192, 4), jnp.float32)] if dtype == jnp.float8_e4m3fn else [])
    text = lower(
        lambda q, latents, indices, layer, *scales: op.sparse_mla(
            q, latents, indices, scale=1 / 16, layer=layer, latent_scales=scales[0] if scales else None,
            implementation="triton",
        ),
        [jax.ShapeDtypeStruct(*shape) for shape in shapes],
        platform,
    )  # fmt: skip
    splits = kernel.choose_tiles(
        tokens, heads, 2051, rocm=platform == "rocm", float8=dtype == jnp.float8_e4m3fn
    ).splits
    assert text.count("__gpu$xla.gpu.triton") == (1 if splits == 1 else 2)


def test_splits_fill_the_chip_and_no_more():
    for tokens, expected in ((1, 32), (32, 4), (128, 1), (8192, 1)):
        assert kernel.choose_tiles(tokens, 64, 2051, rocm=False).splits == expected
