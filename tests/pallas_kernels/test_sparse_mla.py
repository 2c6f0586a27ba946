"""Sparse MLA's XLA reference and its latent cache against numpy in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.test_util import check_grads

from pallas_kernels import sparse_mla as op
from tests.pallas_kernels import sparse_oracles as oracle

FLOAT32_TOLERANCE = 2e-5  # of outputs of order 1: sums of a few hundred float32 products


def problem(seed: int, tokens: int, heads: int, dim: int, rows: int, width: int, layers: int = 3):
    """Queries, latents whose unnamed rows are NaN, indices with holes: no index, every index, one index."""
    random = np.random.default_rng(seed)
    q = random.normal(size=(tokens, heads, dim)).astype(np.float32)
    latents = random.normal(size=(layers, rows, dim)).astype(np.float32)
    indices = random.integers(0, rows, size=(tokens, width)).astype(np.int32)
    indices[random.random(indices.shape) < 0.3] = -1
    indices[0] = -1
    indices[1] = np.where(np.arange(width) == width - 1, 2, -1)
    unnamed = np.setdiff1d(np.arange(rows), indices)
    latents[:, unnamed] = np.nan
    return q, latents, indices


def attend(q: np.ndarray, latents: np.ndarray, indices: np.ndarray, **options) -> np.ndarray:
    options = {"implementation": "xla", **options}
    return np.asarray(op.sparse_mla(jnp.asarray(q), jnp.asarray(latents), jnp.asarray(indices), **options))


@pytest.mark.parametrize(("tokens", "heads", "width"), [(2, 1, 1), (5, 8, 37), (23, 3, 64)])
def test_matches_numpy(tokens: int, heads: int, width: int):
    q, latents, indices = problem(tokens, tokens, heads, 128, 50, width)
    for layer in range(3):
        out = attend(q, latents, indices, scale=0.25, layer=layer)
        expected = oracle.attention(q, latents[layer], indices, 0.25)
        np.testing.assert_allclose(out, expected, atol=FLOAT32_TOLERANCE, rtol=0)
    assert not np.asarray(out)[0].any()


def test_tiles_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch):
    q, latents, indices = problem(7, 19, 2, 128, 40, 12)
    whole = attend(q, latents, indices, scale=0.1, layer=1)
    monkeypatch.setattr(op, "_GATHER_BYTES", 4 * 12 * 128 * 4)
    tiled = attend(q, latents, indices, scale=0.1, layer=1)
    np.testing.assert_allclose(tiled, whole, atol=1e-6, rtol=0)


def test_gather_is_bounded():
    """2,048 rows of 512 channels for each of 512 queries are 2 GiB at once; tiles need a few dozen MiB."""
    q = jax.ShapeDtypeStruct((512, 4, 512), jnp.float32)
    latents = jax.ShapeDtypeStruct((2, 4096, 512), jnp.float32)
    indices = jax.ShapeDtypeStruct((512, 2048), jnp.int32)
    run = jax.jit(lambda *x: op.sparse_mla(*x, scale=0.1, layer=1, implementation="xla"))
    assert run.lower(q, latents, indices).compile().memory_analysis().temp_size_in_bytes < 256 * 2**20


def test_traced_layer_and_order_of_indices():
    q, latents, indices = problem(3, 6, 2, 128, 30, 16)
    q, latents, indices = jnp.asarray(q), jnp.asarray(latents), jnp.asarray(indices)
    run = jax.jit(lambda layer, rows: op.sparse_mla(q, latents, rows, scale=0.3, layer=layer))
    for layer in (0, 2):
        expected = attend(q, latents, indices, scale=0.3, layer=layer)
        np.testing.assert_allclose(run(layer, indices[:, ::-1]), expected, atol=1e-6, rtol=0)


def test_row_past_the_end_is_not_clamped():
    q, latents, indices = problem(4, 3, 1, 128, 10, 4)
    indices[2, 0] = 10
    out = attend(q, latents, indices, scale=0.3, layer=0)
    assert np.isnan(out[2]).all() and not np.isnan(out[:2]).any()


def test_large_scores_do_not_overflow():
    q, latents, indices = problem(5, 4, 2, 128, 20, 8)
    out = attend(q * 1e4, latents, indices, scale=1.0, layer=0)
    np.testing.assert_allclose(out, oracle.attention(q * 1e4, latents[0], indices, 1.0), atol=1e-4, rtol=0)


def test_gradients_match_finite_differences():
    q, latents, indices = problem(6, 4, 2, 128, 12, 6, layers=2)
    latents = np.nan_to_num(latents)

    def loss(q: jax.Array, latents: jax.Array) -> jax.Array:
        out = op.sparse_mla(q, jnp.asarray(latents), jnp.asarray(indices), scale=0.2, layer=1)
        return (out**2).sum()

    check_grads(
        loss, (jnp.asarray(q), jnp.asarray(latents)), order=1, modes=["rev"], atol=2e-2, rtol=2e-2, eps=1e-2
    )


def test_quantised_latents_match_ml_dtypes():
    """30 orders of magnitude, zeros and exact edges: the nearest e4m3 under the smallest scale that fits."""
    random = np.random.default_rng(0)
    values = random.normal(size=(40, 256)) * 10.0 ** random.uniform(-15, 15, size=(40, 1))
    values[0] = 0
    values[1, :3] = [448, -448, 1]
    values[2] = np.where(np.arange(256) == 5, 449, 1)
    values = values.astype(np.float32)
    quantized, scales = (np.asarray(x) for x in op.quantize_latents(jnp.asarray(values)))
    assert quantized.shape == (40, 256) and scales.shape == (40, 2)
    for row in range(40):
        for group in range(2):
            part = values[row, group * 128 : (group + 1) * 128].astype(np.float64)
            scale = float(scales[row, group])
            assert np.log2(scale) == np.floor(np.log2(scale))
            assert abs(part).max() <= 448 * scale
            assert abs(part).max() > 448 * scale / 2 or not part.any()
            expected = (part / scale).astype(ml_dtypes.float8_e4m3fn)
            np.testing.assert_array_equal(
                quantized[row, group * 128 : (group + 1) * 128].astype(np.float32),
                expected.astype(np.float32),
            )


def test_dequantised_latents_are_exact_in_bfloat16():
    values = np.random.default_rng(1).normal(size=(9, 384)).astype(np.float32) * 30
    quantized, scales = op.quantize_latents(jnp.asarray(values))
    narrow = op.dequantize_latents(quantized, scales, jnp.bfloat16).astype(jnp.float32)
    wide = op.dequantize_latents(quantized, scales, jnp.float32)
    np.testing.assert_array_equal(narrow, wide)
    # Half a unit in the last of e4m3's 4 significant bits, or half of its smallest subnormal, 2**-9.
    bound = np.maximum(abs(values) * 2.0**-4, np.repeat(np.asarray(scales), 128, axis=-1) * 2.0**-10)
    assert (abs(np.asarray(wide) - values) <= bound).all()


def test_quantised_groups_must_divide():
    with pytest.raises(ValueError, match="192 channels"):
        op.quantize_latents(jnp.zeros((2, 192)))


def test_attention_over_quantised_latents():
    q, latents, indices = problem(8, 7, 3, 256, 25, 9)
    quantized, scales = op.quantize_latents(jnp.asarray(latents))
    out = attend(q, quantized, indices, scale=0.2, layer=2, latent_scales=scales)
    seen = np.asarray(op.dequantize_latents(quantized, scales, jnp.float32))
    np.testing.assert_allclose(
        out, oracle.attention(q, seen[2], indices, 0.2), atol=FLOAT32_TOLERANCE, rtol=0
    )


def test_write_touches_only_its_rows():
    latents = jnp.full((2, 8, 128), jnp.nan)
    values = np.random.default_rng(2).normal(size=(5, 128)).astype(np.float32)
    rows = jnp.array([7, -1, 0, 8, 3])
    written = np.asarray(op.write_latents(latents, 1, rows, values))
    assert np.isnan(written[0]).all() and np.isnan(written[1, [1, 2, 4, 5, 6]]).all()
    np.testing.assert_array_equal(written[1, [7, 0, 3]], values[[0, 2, 4]])


def test_write_quantises():
    values = np.random.default_rng(3).normal(size=(3, 256)).astype(np.float32)
    cache = jnp.zeros((2, 6, 256), jnp.float8_e4m3fn), jnp.full((2, 6, 2), jnp.nan, jnp.float32)
    write = jax.jit(lambda layer: op.write_latents(cache[0], layer, jnp.array([5, -1, 2]), values, cache[1]))
    latents, scales = write(0)
    quantized, expected_scales = op.quantize_latents(jnp.asarray(values))
    np.testing.assert_array_equal(latents[0, jnp.array([5, 2])], quantized[jnp.array([0, 2])])
    np.testing.assert_array_equal(scales[0, jnp.array([5, 2])], expected_scales[jnp.array([0, 2])])
    assert np.isnan(scales[1]).all() and np.isnan(scales[0, jnp.array([0, 1, 3, 4])]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": np.zeros((3, 2), np.int32)}, "does not fit"),
        ({"latents": np.zeros((1, 4, 64), np.float32)}, "does not fit"),
        ({"latents": np.zeros((4, 128), np.float32)}, "latents \\[layers, rows, dim\\]"),
        ({"latent_scales": np.zeros((1, 4, 1), np.float32)}, "without"),
    ],
)
def test_bad_shapes_are_refused(change: dict[str, np.ndarray], message: str):
    arguments = {
        "q": np.zeros((2, 1, 128), np.float32),
        "latents": np.zeros((1, 4, 128), np.float32),
        "indices": np.zeros((2, 2), np.int32),
    }
    arguments.update(change)
    with pytest.raises(ValueError, match=message):
        op.sparse_mla(**arguments, scale=1.0, layer=0)
