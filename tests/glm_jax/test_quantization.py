"""Block-scaled weights behind one matmul, and the fp8 twin of a checkpoint."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import glm_jax
from glm_jax import params
from glm_jax.config import load_config
from glm_jax.loading import Model, load
from glm_jax.quantization import BlockScaled, dequantize, matmul, quantize
from glm_jax.quantize import dequantized, main, quantized
from glm_jax.saving import save
from tests.tiny_checkpoints import raw_config, read_folder


def weight(rows: int, columns: int, *leading: int) -> BlockScaled:
    generator = np.random.default_rng(rows * columns)
    values = generator.normal(size=(*leading, rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    scales = generator.uniform(0.01, 1, (*leading, -(-rows // 128), -(-columns // 128))).astype(np.float32)
    return BlockScaled(jnp.asarray(values), jnp.asarray(scales))


def by_element(w: BlockScaled) -> np.ndarray:
    values, scales = np.asarray(w.values).astype(np.float64), np.asarray(w.scales).astype(np.float64)
    rows, columns = np.indices(values.shape[-2:])
    return values * scales[..., rows // 128, columns // 128]


@pytest.mark.parametrize("shape", [(128, 128), (130, 260, 3), (7, 5), (256, 40, 2)])
def test_dequantize_multiplies_each_block_by_its_scale(shape: tuple[int, ...]) -> None:
    rows, columns, *leading = shape
    w = weight(rows, columns, *leading)
    # one rounding of an exact product of two float32 numbers
    np.testing.assert_array_equal(dequantize(w, jnp.float32), by_element(w).astype(np.float32))
    assert w.shape == (*leading, rows, columns) and w.dtype == jnp.float8_e4m3fn


def test_a_stack_is_indexed_with_its_scales() -> None:
    w = weight(130, 40, 3, 2)
    np.testing.assert_array_equal(dequantize(w[1, 0], jnp.float32), dequantize(w, jnp.float32)[1, 0])


def test_matmul_is_the_dequantised_product_bit_for_bit() -> None:
    w = weight(130, 260)
    x = jax.random.normal(jax.random.key(0), (2, 3, 260))
    plain = dequantize(w, jnp.float32)
    for function in (matmul, jax.jit(matmul)):
        product = function(x, w)
        np.testing.assert_array_equal(product, function(x, plain))
        assert product.shape == (2, 3, 130) and product.dtype == jnp.float32
    # 260 float32 products summed: 260 * 2**-24 of the largest partial sum
    np.testing.assert_allclose(matmul(x, w), np.asarray(x) @ by_element(w).T, rtol=0, atol=2e-5)


def test_matmul_in_bfloat16_accumulates_in_float32() -> None:
    x = jnp.ones((1, 4096), jnp.bfloat16)
    product = matmul(x, jnp.ones((2, 4096), jnp.bfloat16))
    assert product.dtype == jnp.bfloat16 and (product == 4096).all()  # bfloat16 sums would stop at 256


def test_weights_take_the_dtype_of_the_activations() -> None:
    x = jnp.asarray([[1 + 2.0**-12]])
    product = matmul(x, jnp.ones((1, 1), jnp.bfloat16))
    assert product.dtype == jnp.float32 and product[0, 0] == x[0, 0]


def test_quantised_activations_are_rounded_only_when_asked() -> None:
    w = weight(128, 128)
    x = jax.random.normal(jax.random.key(1), (4, 128))
    rounded = matmul(x, w, quantize_activations=True)
    scale = np.abs(np.asarray(x)).max(-1, keepdims=True) / 448
    by_hand = (np.asarray(x) / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    np.testing.assert_allclose(rounded, by_hand @ by_element(w).T, rtol=0, atol=2e-5)
    assert np.abs(np.asarray(rounded - matmul(x, w))).max() > 1e-3


def test_matmul_is_differentiable_in_the_activations() -> None:
    w = weight(130, 40)
    x = jnp.ones((2, 40))
    gradient = jax.grad(lambda x: matmul(x, w).sum())(x)
    np.testing.assert_allclose(gradient[0], by_element(w).sum(0), atol=2e-5, rtol=0)


def test_quantize_keeps_the_largest_value_of_a_block() -> None:
    w = jax.random.normal(jax.random.key(2), (2, 200, 136))
    rounded = jax.jit(lambda w: dequantize(quantize(w), jnp.float32))(w)
    # e4m3 has 3 mantissa bits: half a step is 1/16 of a normal number; 2**-10 of the scale where subnormal
    assert (jnp.abs(rounded - w) <= jnp.maximum(jnp.abs(w) / 16, 2.0**-10 * jnp.abs(w).max() / 448)).all()


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    config = load_config(raw_config())
    save(Model(config, params.init(config, jax.random.key(0), "bfloat16")), tmp_path / "plain")
    return tmp_path / "plain"


def test_the_command_writes_the_released_layout(plain: Path, tmp_path: Path) -> None:
    main([str(plain), str(tmp_path / "fp8")])
    released = params.checkpoint_tensors(load_config(raw_config(quantized=True)))
    assert {
        name: (shape, dtype) for name, (dtype, shape, _) in read_folder(tmp_path / "fp8").items()
    } == released
    model = load(tmp_path / "fp8")
    assert model.config == dataclasses.replace(load_config(plain), quantization=128)
    with pytest.raises(FileExistsError):
        main([str(plain), str(tmp_path / "fp8")])
    main([str(plain), str(tmp_path / "fp8"), "--overwrite"])


def test_quantised_and_dequantised_twins(plain: Path) -> None:
    twin = quantized(load(plain, dtype=None))
    again = quantized(twin)
    assert again.config == twin.config
    for left, right in zip(jax.tree.leaves(twin.params), jax.tree.leaves(again.params), strict=True):
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()
    wide = params.named_leaves(dequantized(twin).params)
    specs = params.named_leaves(params.abstract(twin.config), params.is_spec)
    assert {path for path, leaf in wide.items() if leaf.dtype == jnp.float32} == {
        path for path, spec in specs.items() if spec.block_scaled or spec.float32_island
    }


def test_fp8_and_its_float32_twin_give_the_same_logits(tmp_path: Path) -> None:
    lists = {"layer_types": ["linear_attention", "indexed_attention"], "mlp_layer_types": ["dense", "sparse"]}
    config = load_config(
        raw_config(num_hidden_layers=2, indexer_types=["full"] * 2, num_nextn_predict_layers=0, **lists)
    )
    model = quantized(Model(config, params.init(config, jax.random.key(0), "bfloat16")))
    save(model, tmp_path / "fp8")
    fp8 = load(tmp_path / "fp8", dtype="float32")
    save(dequantized(fp8), tmp_path / "twin")
    twin = load(tmp_path / "twin", dtype="float32")
    assert isinstance(fp8.params.layers[1].mlp.down, BlockScaled)
    assert isinstance(twin.params.layers[1].mlp.down, jax.Array)
    tokens = jax.random.randint(jax.random.key(3), (1, 40), 0, config.vocab_size)
    logits = glm_jax.forward(fp8.params, fp8.config, tokens)
    np.testing.assert_array_equal(logits, glm_jax.forward(twin.params, twin.config, tokens))
    assert np.asarray(logits).std() > 0.1  # not equal because both are zero
