"""Block-scaled float8: quantisation, the matmul's reference and its kernel in the Pallas interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import block_scaled as op
from pallas_kernels import triton
from pallas_kernels.block_scaled_kernel import Plan, block_scaled_matmul_triton
from pallas_kernels.matmul_tile import Tile
from tests.pallas_kernels import expert_oracles as oracle
from tests.pallas_kernels.device import INTERPRET
from tests.pallas_kernels.lowering import lower

E4M3_STEP = 2**-4  # half of the last place of e4m3's three mantissa bits, relative
BFLOAT16_STEP = 2**-8


def weight(seed: int, *shape: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.normal(size=shape) * random.uniform(0.01, 3, size=(shape[0], 1))).astype(np.float32)


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (130, 257), (300, 40)])
def test_quantised_weights_come_back(shape: tuple[int, int]):
    w = weight(0, *shape)
    values, scales = op.quantize_blocks(jnp.asarray(w))
    assert values.dtype == jnp.float8_e4m3fn and scales.dtype == jnp.float32
    assert scales.shape == tuple(-(-n // 128) for n in shape)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = w[row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128]
            np.testing.assert_allclose(scales[row, column], np.abs(block).max() / 448, rtol=1e-6)
    back = op.dequantize_blocks(values, scales, jnp.float32)
    np.testing.assert_allclose(back, oracle.dequantize(values, scales), rtol=1e-6)
    # Below e4m3's normal range, 2**-6 in units of the scale, the step is fixed.
    spread = np.repeat(np.repeat(np.asarray(scales), 128, 0), 128, 1)[: shape[0], : shape[1]]
    error = np.abs(np.asarray(back) - w)
    assert (error <= np.maximum(np.abs(w) * E4M3_STEP, spread * 2**-10) * 1.0001).all()


def test_requantising_changes_nothing():
    """A weight that is already a multiple of its scale survives another round."""
    values, scales = op.quantize_blocks(jnp.asarray(weight(1, 200, 150)))
    again = op.quantize_blocks(op.dequantize_blocks(values, scales, jnp.float32))
    np.testing.assert_array_equal(oracle.wide(again[0]), oracle.wide(values))


def test_zeros_have_scale_one():
    values, scales = op.quantize_blocks(jnp.zeros((3, 5)))
    assert float(scales[0, 0]) == 1 and not oracle.wide(values).any()
    values, scales = op.quantize_activations(jnp.zeros((2, 130)))
    assert (np.asarray(scales) == 1).all() and not oracle.wide(values).any()


def test_activations_are_quantised_per_token_and_group():
    x = weight(2, 7, 200)
    values, scales = op.quantize_activations(jnp.asarray(x))
    assert scales.shape == (7, 2)
    for token in range(7):
        for group, channels in enumerate((slice(0, 128), slice(128, 200))):
            np.testing.assert_allclose(
                scales[token, group], np.abs(x[token, channels]).max() / 448, rtol=1e-6
            )
            back = oracle.wide(values)[token, channels] * float(scales[token, group])
            bound = np.maximum(np.abs(x[token, channels]) * E4M3_STEP, float(scales[token, group]) * 2**-10)
            assert (np.abs(back - x[token, channels]) <= bound * 1.0001).all()


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize(("tokens", "channels", "columns"), [(1, 130, 7), (9, 256, 300)])
def test_matmul_against_numpy(tokens: int, channels: int, columns: int, quantize: bool):
    x = weight(3, tokens, channels)
    values, scales = op.quantize_blocks(jnp.asarray(weight(4, columns, channels)))
    out = op.block_scaled_matmul(
        jnp.asarray(x), values, scales, quantize_activations=quantize, implementation="xla"
    )
    seen = oracle.wide(op.round_activations(jnp.asarray(x))) if quantize else x
    expected = seen @ oracle.dequantize(values, scales).T
    # A few hundred float32 products, relative to the largest possible sum.
    bound = np.abs(seen) @ np.abs(oracle.dequantize(values, scales)).T * 3e-6
    assert (np.abs(np.asarray(out) - expected) <= bound).all()


def test_same_bits_as_a_plain_weight():
    x = jnp.asarray(weight(5, 6, 140))
    values, scales = op.quantize_blocks(jnp.asarray(weight(6, 33, 140)))
    plain = op.dequantize_blocks(values, scales, jnp.float32)
    out = op.block_scaled_matmul(x, values, scales, quantize_activations=False, implementation="xla")
    expected = jnp.matmul(x, plain.T, precision=jax.lax.Precision.HIGHEST)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("operands", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize(("rows", "tile_rows", "columns"), [(1, 16, 32), (33, 16, 256), (70, 64, 128)])
def test_kernel_against_reference(rows: int, tile_rows: int, columns: int, quantize: bool, operands: str):
    """Ragged rows, tiles within one scale block and over two, groups of row tiles past the last one."""
    x = jnp.asarray(weight(rows, rows, 256), jnp.bfloat16)
    values, scales = op.quantize_blocks(jnp.asarray(weight(8, 256, 256)))
    plan = Plan(Tile(tile_rows, columns, 128, 3, triton.Launch()), operands)
    out = block_scaled_matmul_triton(x, values, scales, quantized=quantize, interpret=INTERPRET, plan=plan)
    expected = op.block_scaled_matmul(x, values, scales, quantize_activations=quantize, implementation="xla")
    # Both round the same float32 sum, taken in another order, to bfloat16: at most neighbours.
    largest = np.abs(oracle.wide(expected)).max()
    np.testing.assert_allclose(
        oracle.wide(out), oracle.wide(expected), rtol=2 * BFLOAT16_STEP, atol=largest * 1e-5
    )


def test_tile_wider_than_what_divides_the_weight():
    x = jnp.asarray(weight(3, 70, 256), jnp.bfloat16)
    values, scales = op.quantize_blocks(jnp.asarray(weight(8, 384, 256)))
    plan = Plan(Tile(64, 256, 128, 1, triton.Launch()))
    out = block_scaled_matmul_triton(x, values, scales, quantized=True, interpret=INTERPRET, plan=plan)
    expected = oracle.wide(
        op.block_scaled_matmul(x, values, scales, quantize_activations=True, implementation="xla")
    )
    # neighbours in bfloat16, as above
    tolerance = {"rtol": 2 * BFLOAT16_STEP, "atol": np.abs(expected).max() * 1e-5}
    np.testing.assert_allclose(oracle.wide(out), expected, **tolerance)


@pytest.mark.parametrize("quantize", [False, True])
def test_dequantised_once_against_reference(quantize: bool):
    """XLA's product of the dequantised weight, which many rows take."""
    x = jnp.asarray(weight(3, 70, 256), jnp.bfloat16)
    values, scales = op.quantize_blocks(jnp.asarray(weight(8, 384, 256)))
    run = jax.jit(lambda *a: block_scaled_matmul_triton(*a, quantized=quantize, plan=Plan(None)))
    out = oracle.wide(run(x, values, scales))
    seen = oracle.wide(op.round_activations(x)) if quantize else oracle.wide(x)
    plain = oracle.dequantize(values, scales)
    # Two operands and the result rounded to bfloat16, half a step each, against the largest possible sum.
    bound = 1.5 * BFLOAT16_STEP * np.abs(seen) @ np.abs(plain).T
    assert (np.abs(out - seen @ plain.T) <= bound).all()
    assert np.linalg.norm(out - seen @ plain.T) < BFLOAT16_STEP * np.linalg.norm(out)


def test_activations_stay_rounded_in_a_compiled_program():
    """XLA may drop a conversion to float8 that is undone at once."""
    x = jnp.asarray(weight(3, 9, 256))
    rounded = oracle.wide(jax.jit(op.round_activations)(x))
    values, scales = op.quantize_activations(x)
    np.testing.assert_allclose(rounded, oracle.wide(values) * np.repeat(scales, 128, axis=1), rtol=1e-6)
    assert np.linalg.norm(rounded - x) > 1e-2 * np.linalg.norm(x)


def test_refuses_what_does_not_fit():
    values, scales = op.quantize_blocks(jnp.ones((256, 256)))
    with pytest.raises(ValueError, match=r"scales of shape \(2, 2\), got \(2, 1\)"):
        op.block_scaled_matmul(jnp.ones((3, 256)), values, scales[:, :1], quantize_activations=False)
    with pytest.raises(ValueError, match="255 channels does not fit a weight of 256"):
        op.block_scaled_matmul(jnp.ones((3, 255)), values, scales, quantize_activations=False)
    with pytest.raises(ValueError, match="does not support"):
        op.block_scaled_matmul(
            jnp.ones((3, 256)), values, scales, quantize_activations=False, implementation="interpret"
        )


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("rows", [1, 32, 512, 8192])
def test_lowers(rows: int, platform: str):
    shapes = (
        jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16),
        jax.ShapeDtypeStruct((12288, 4096), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((96, 32), jnp.float32),
    )
    for quantize in (False, True):

        def call(x, values, scales, quantize=quantize):
            return op.block_scaled_matmul(
                x, values, scales, quantize_activations=quantize, implementation="triton"
            )

        kernels = lower(call, shapes, platform).count("__gpu$xla.gpu.triton")
        assert kernels == (0 if platform == "cuda" and rows > 256 and not quantize else 1)
