"""Offsets into large one-byte arrays: read from the kernels' Triton IR, and run with wide ones forced."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal_mla, grouped_mlp, sparse_mla, triton, triton_layout
from tests.amd import gate
from tests.pallas_kernels.device import INTERPRET
from tests.pallas_kernels.lowering import lower, target

FLOAT8 = jnp.float8_e4m3fn


def shape(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype)


def experts(count: int):
    """The released model's experts for 32 tokens."""
    arguments = (
        shape(jnp.bfloat16, 32, 4096),
        shape(jnp.int32, 32, 8),
        shape(jnp.float32, 32, 8),
        shape(FLOAT8, count, 2, 2048, 4096),
        shape(FLOAT8, count, 4096, 2048),
        shape(jnp.float32, count, 2, 16, 32),
        shape(jnp.float32, count, 32, 16),
    )

    def run(*arrays):
        return grouped_mlp.grouped_mlp(
            *arrays[:5], limit=10.0, gate_up_scales=arrays[5], down_scales=arrays[6],
            quantize_activations=False, implementation="triton",
        )  # fmt: skip

    return run, arguments


def sparse(rows: int):
    arguments = (
        shape(jnp.bfloat16, 4, 64, 512),
        shape(FLOAT8, 12, rows, 512),
        shape(jnp.int32, 4, 2051),
        shape(jnp.float32, 12, rows, 4),
    )

    def run(q, latents, indices, scales):
        return sparse_mla.sparse_mla(
            q, latents, indices, scale=0.1, layer=11, latent_scales=scales, implementation="triton"
        )

    return run, arguments


def causal(rows: int):
    arguments = (
        shape(jnp.bfloat16, 256, 8, 512),
        shape(FLOAT8, 12, rows, 512),
        shape(jnp.int32, 2, 64),
        shape(jnp.int32, 256),
        shape(jnp.int32, 256),
        shape(jnp.float32, 12, rows, 4),
    )

    def run(*arrays):
        return causal_mla.causal_mla(
            *arrays[:5], block_size=64, scale=0.1, layer=11, latent_scales=arrays[5], implementation="triton"
        )

    return run, arguments


def widths(function, arguments) -> dict[str, set[str]]:
    """Kernel -> integer types of the offsets that it adds to pointers to float8."""
    with target("rocm"):
        kernels = gate.lower(gate.Case("offsets", function, arguments))
    pattern = r"tt\.addptr [^\n]*: (?:tensor<[\dx]*)?!tt\.ptr<f8E4M3FN>>?, (?:tensor<[\dx]*)?(i\d+)"
    return {kernel.name: set(re.findall(pattern, kernel.text)) for kernel in kernels}


@pytest.mark.parametrize(
    ("problem", "below", "between", "above", "kernel"),
    [
        (experts, 36, 288, 520, "expert_down"),
        (sparse, 300_000, 400_000, 800_000, "sparse_mla"),
        (causal, 300_000, 400_000, 800_000, "causal_mla"),
    ],
)
def test_offsets_are_wide_where_narrow_ones_would_wrap(problem, below, between, above, kernel):
    """Up to 2**31 elements 32 bits do; one-byte arrays of 2 to 4 GiB are what Pallas-Triton gets wrong."""
    assert widths(*problem(below))[kernel] == {"i32"}
    assert widths(*problem(between))[kernel] == {"i64"}
    assert widths(*problem(above))[kernel] == {"i64"}


def test_declaring_rows_moves_no_data():
    """The kernel's operand is the program's argument itself, with its own shape."""
    function, arguments = experts(288)
    text = lower(function, arguments, "cuda")
    declared = "288x4096x2048xf8E4M3FN"
    assert "576x4096x2048" not in text and declared in text
    signatures = [line for line in text.splitlines() if "gpu.triton" in line and declared in line]
    assert len(signatures) == 1


def product(platform: str) -> str:
    """The Triton IR of a float8 product of 64 x 128 x 128."""

    def kernel(a_ref, b_ref, out_ref):
        out_ref[...] = triton.float8_dot(a_ref[...], b_ref[...])

    def run(a, b):
        return triton.pallas_call(kernel, out_shape=shape(jnp.float32, 64, 128), grid=(1,), name="product")(
            a, b
        )

    with target(platform):
        (found,) = gate.lower(
            gate.Case("product", run, (shape(FLOAT8, 64, 128), shape(FLOAT8, 128, 128))), platform
        )
    return found.text


def test_float8_products_may_sum_in_the_tensor_core():
    """Hopper's Triton makes asynchronous products of float8 under this attribute only."""
    assert "maxNumImpreciseAcc = 128" in product("cuda")
    assert "maxNumImpreciseAcc = 128" not in product("rocm")


def test_float8_products():
    """Against float64: exact products, sums of 128 of them in the tensor core's 14 bits or in float32."""
    random = np.random.default_rng(0)
    a, b = (jnp.asarray(random.normal(size=(n, 128)), FLOAT8) for n in (64, 128))

    def kernel(a_ref, b_ref, out_ref):
        out_ref[...] = triton.float8_dot(a_ref[...], b_ref[...])

    run = triton.pallas_call(
        kernel, out_shape=shape(jnp.float32, 64, 128), grid=(1,), interpret=INTERPRET, name="product"
    )
    wide = [np.asarray(x).astype(np.float64) for x in (a, b)]
    tolerance = 1e-5 if INTERPRET else 2**-11 * 16  # the largest term is some 16
    np.testing.assert_allclose(run(a, b), wide[0] @ wide[1].T, rtol=0, atol=tolerance)


@pytest.mark.parametrize("largest", [2**31, 0])
def test_reads_are_the_same(largest: int, monkeypatch: pytest.MonkeyPatch):
    """On a GPU with the wide offsets forced upon every operand; the interpreter has no offsets."""
    declare = triton.wide_offsets
    monkeypatch.setattr(triton, "wide_offsets", lambda array: declare(array, largest))
    x = jnp.arange(6 * 32 * 64, dtype=jnp.float32).reshape(6, 32, 64)

    def kernel(index_ref, x_ref, out_ref):
        out_ref[...] = x_ref[index_ref[0]]

    run = triton.pallas_call(
        kernel, out_shape=shape(x.dtype, 32, 64), grid=(1,), interpret=INTERPRET, name="reads"
    )
    for row in (0, 5):
        np.testing.assert_array_equal(run(jnp.array([row], jnp.int32), x), x[row])


def test_primitives_of_our_own_are_known_to_this_jax():
    """Without them kernels still compute the same, slowly: float8 without Hopper's asynchronous products,
    hyper-connections with their update computed twice."""
    assert triton._HAS_FLOAT8_DOT
    assert triton_layout._HAS_COMPUTE_ONCE


@pytest.mark.parametrize(("platform", "count"), [("cuda", 1), ("rocm", 0)])
def test_compute_once_moves_registers_on_cuda_only(platform, count):
    def kernel(x_ref, y_ref):
        y_ref[...] = triton_layout.compute_once(x_ref[...])

    def run(x):
        return triton.pallas_call(kernel, out_shape=x, grid=(1,))(x)

    case = gate.Case("compute once", run, (shape(jnp.bfloat16, 16, 32),))
    with target(platform):
        (found,) = gate.lower(case, platform)
    assert found.text.count("mov.b32") == count
