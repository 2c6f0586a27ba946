"""Hyper-connections: the XLA reference against numpy in float64, the kernels against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hyper_connection as op
from pallas_kernels import hyper_connection_kernel as kernel
from pallas_kernels import triton
from tests.pallas_kernels import stream_oracles as oracle
from tests.pallas_kernels.device import INTERPRET, KERNEL
from tests.pallas_kernels.lowering import lower

OPTIONS = {"norm_eps": 1e-5, "hc_eps": 1e-6, "sinkhorn_iterations": 20}
compiled_pre = jax.jit(op.hyper_connection_pre, static_argnames=(*OPTIONS, "implementation"))
FLOAT32_TOLERANCE = 1e-5  # gates and streams of order 1, sums of a few hundred products
BFLOAT16_ROUNDING = 2**-8
BFLOAT16_NEIGHBOUR = 2**-7


def problem(seed: int, tokens: int, n: int, dim: int, sharpness: float = 1.0):
    """sharpness scales the logits of comb: at 30 a softmax row is one-hot, the hard case for Sinkhorn."""
    random = np.random.default_rng(seed)
    streams = random.normal(size=(tokens, n, dim)) * random.uniform(0.1, 5, size=(tokens, 1, 1))
    fn = random.normal(size=(n * (2 + n), n * dim)) / (n * dim) ** 0.5
    base = random.normal(size=n * (2 + n))
    scale = np.array([0.7, 1.2, 0.9]) * sharpness
    out = random.normal(size=(tokens, dim))
    return [a.astype(np.float32) for a in (streams, fn, base, scale, out)]


@pytest.mark.parametrize(("tokens", "n", "dim"), [(1, 4, 32), (7, 4, 50), (3, 2, 9)])
@pytest.mark.parametrize("sharpness", [1.0, 30.0])
def test_reference_against_numpy(tokens: int, n: int, dim: int, sharpness: float):
    streams, fn, base, scale, out = problem(0, tokens, n, dim, sharpness)
    found = compiled_pre(*map(jnp.asarray, (streams, fn, base, scale)), **OPTIONS, implementation="xla")
    expected = oracle.pre(streams, fn, base, scale, 1e-5, 1e-6, 20)
    for got, wanted in zip(found, expected, strict=True):
        # The logits' own rounding is scaled with them.
        np.testing.assert_allclose(got, wanted, atol=FLOAT32_TOLERANCE * max(1, sharpness), rtol=1e-5)
    updated = op.hyper_connection_post(
        *map(jnp.asarray, (streams, out)), found[1], found[2], implementation="xla"
    )
    wanted = oracle.post(streams, out, found[1], found[2])
    np.testing.assert_allclose(updated, wanted, atol=5 * FLOAT32_TOLERANCE, rtol=1e-5)


def test_comb_is_nearly_doubly_stochastic_and_transposed_in_use():
    """Columns were normalised last; destination k takes column k."""
    streams, fn, base, scale, _ = map(jnp.asarray, problem(1, 5, 4, 16))
    _, _, comb = compiled_pre(streams, fn, base, scale, **OPTIONS, implementation="xla")
    np.testing.assert_allclose(comb.sum(axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(comb.sum(axis=2), 1, atol=0.1)
    only = jnp.zeros((5, 4, 4)).at[:, 2, 1].set(1.0)
    moved = op.hyper_connection_post(
        streams, jnp.zeros((5, 16)), jnp.zeros((5, 4)), only, implementation="xla"
    )
    np.testing.assert_array_equal(moved[:, 1], streams[:, 2])
    assert not np.asarray(moved)[:, [0, 2, 3]].any()


def test_bfloat16_is_computed_in_float32():
    """Rounded once at the end: as if the rounded inputs had been float32."""
    streams, fn, base, scale, out = map(jnp.asarray, problem(2, 6, 4, 40))
    streams, fn, out = (a.astype(jnp.bfloat16) for a in (streams, fn, out))
    hidden, post, comb = compiled_pre(streams, fn, base, scale, **OPTIONS, implementation="xla")
    assert hidden.dtype == jnp.bfloat16 and post.dtype == comb.dtype == jnp.float32
    expected = oracle.pre(streams, fn, base, scale, 1e-5, 1e-6, 20)
    np.testing.assert_allclose(np.float64(hidden), expected[0], rtol=BFLOAT16_ROUNDING, atol=1e-4)
    np.testing.assert_allclose(post, expected[1], atol=FLOAT32_TOLERANCE)
    np.testing.assert_allclose(comb, expected[2], atol=FLOAT32_TOLERANCE)
    updated = op.hyper_connection_post(streams, out, post, comb, implementation="xla")
    wanted = oracle.post(streams, out, post, comb)
    np.testing.assert_allclose(np.float64(updated), wanted, rtol=BFLOAT16_ROUNDING, atol=1e-4)


def test_gradients_agree_with_differences():
    streams, fn, base, scale, out = map(jnp.asarray, problem(3, 3, 4, 12))

    def loss(streams, fn, base, scale, out):
        hidden, post, comb = op.hyper_connection_pre(
            streams, fn, base, scale, **OPTIONS, implementation="xla"
        )
        updated = op.hyper_connection_post(streams, out, post, comb, implementation="xla")
        return jnp.sin(hidden).sum() + jnp.sin(updated).sum()

    inputs = (streams, fn, base, scale, out)
    gradients = jax.jit(jax.grad(loss, argnums=tuple(range(5))))(*inputs)
    evaluate = jax.jit(loss)
    for index, gradient in enumerate(gradients):
        direction = jax.random.normal(jax.random.key(index), gradient.shape)
        direction = direction / jnp.linalg.norm(direction)
        step = 1e-2
        moved = [
            evaluate(*(v + sign * step * direction if i == index else v for i, v in enumerate(inputs)))
            for sign in (1, -1)
        ]
        slope = float((moved[0] - moved[1]) / (2 * step))
        # The difference loses about 1e-6 / 1e-2 of a loss of order 10, beside its second-order term.
        np.testing.assert_allclose(float((gradient * direction).sum()), slope, rtol=2e-2, atol=5e-3)


def test_sinkhorn_compiles_to_one_loop():
    """Unrolled it is most of a model's compile time."""
    streams, fn, base, scale, _ = map(jnp.asarray, problem(4, 3, 4, 12))
    text = compiled_pre.lower(streams, fn, base, scale, **OPTIONS, implementation="xla").as_text()
    assert text.count("stablehlo.while") == 1 and text.count("stablehlo.divide") < 15


compiled_kernel = jax.jit(kernel.hyper_connection_triton, static_argnames=(*OPTIONS, "interpret", "plan"))
PLANS = [
    kernel.Plan(16, 128, 1, 128, 1, triton.Launch(), triton.Launch()),
    kernel.Plan(16, 128, 2, 128, 2, triton.Launch(), triton.Launch()),
    kernel.Plan(16, 16, 16, 64, 2, triton.Launch(), triton.Launch()),  # many partial sums, two collapse steps
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("tokens", [1, 16, 21])
def test_kernels_against_reference(tokens: int, plan: kernel.Plan):
    streams, fn, base, scale, out = map(jnp.asarray, problem(5, tokens, 4, 256))
    streams, fn, out = (a.astype(jnp.bfloat16) for a in (streams, fn, out))
    expected = op.hyper_connection_pre(streams, fn, base, scale, **OPTIONS, implementation="xla")
    found = compiled_kernel(streams, fn, base, scale, **OPTIONS, interpret=INTERPRET, plan=plan)
    np.testing.assert_array_equal(np.float32(found[0]), np.float32(streams))
    compare(found[1:], expected)

    _, post, comb = expected
    found = compiled_kernel(
        streams, fn, base, scale, (out, post, comb), **OPTIONS, interpret=INTERPRET, plan=plan
    )
    updated = op.hyper_connection_post(streams, out, post, comb, implementation="xla")
    np.testing.assert_allclose(np.float32(found[0]), np.float32(updated), rtol=BFLOAT16_NEIGHBOUR, atol=1e-5)
    # Streams that differ by a bfloat16 neighbour here and there move the gates a little.
    expected = op.hyper_connection_pre(updated, fn, base, scale, **OPTIONS, implementation="xla")
    compare(found[1:], expected, 2e-4)


def compare(found, expected, tolerance: float = FLOAT32_TOLERANCE) -> None:
    hidden, post, comb = found
    np.testing.assert_allclose(
        np.float32(hidden), np.float32(expected[0]), rtol=BFLOAT16_NEIGHBOUR, atol=100 * tolerance
    )
    np.testing.assert_allclose(post, expected[1], atol=tolerance)
    np.testing.assert_allclose(comb, expected[2], atol=tolerance)


def test_public_ops_run_the_kernels():
    streams, fn, base, scale, out = map(jnp.asarray, problem(6, 5, 4, 128))
    streams, fn, out = (a.astype(jnp.bfloat16) for a in (streams, fn, out))
    results = {}
    for implementation in ("xla", KERNEL):
        hidden, post, comb = op.hyper_connection_pre(
            streams, fn, base, scale, **OPTIONS, implementation=implementation
        )
        updated = op.hyper_connection_post(streams, out, post, comb, implementation=implementation)
        boundary = op.hyper_connection_post_pre(
            streams, out, post, comb, fn, base, scale, **OPTIONS, implementation=implementation
        )
        results[implementation] = (hidden, post, comb, updated, *boundary)
        np.testing.assert_allclose(
            np.float32(boundary[0]), np.float32(updated), rtol=BFLOAT16_NEIGHBOUR, atol=1e-5
        )
    for found, expected in zip(results[KERNEL], results["xla"], strict=True):
        np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=2**-7, atol=2e-2)


def test_refuses_what_does_not_fit():
    streams, fn, base, scale, _ = map(jnp.asarray, problem(7, 3, 4, 12))
    with pytest.raises(ValueError, match="got \\(24, 47\\)"):
        op.hyper_connection_pre(streams, fn[:, :-1], base, scale, **OPTIONS)
    with pytest.raises(ValueError, match="sinkhorn_iterations must be at least 1, got 0"):
        op.hyper_connection_pre(streams, fn, base, scale, **{**OPTIONS, "sinkhorn_iterations": 0})
    with pytest.raises(ValueError, match="does not support"):
        op.hyper_connection_pre(streams, fn, base, scale, **OPTIONS, implementation="interpret")


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("tokens", [1, 32, 8192])
def test_lowers(tokens: int, platform: str):
    def shape(dtype, *sizes):
        return jax.ShapeDtypeStruct(sizes, dtype)

    streams, out = shape(jnp.bfloat16, tokens, 4, 4096), shape(jnp.bfloat16, tokens, 4096)
    gates = (shape(jnp.float32, tokens, 4), shape(jnp.float32, tokens, 4, 4))
    weights = (shape(jnp.bfloat16, 24, 16384), shape(jnp.float32, 24), shape(jnp.float32, 3))

    def launches(function, *arguments) -> int:
        return lower(function, arguments, platform).count("__gpu$xla.gpu.triton")

    def boundary(*arrays):
        return op.hyper_connection_post_pre(*arrays, **OPTIONS, implementation="triton")

    def pre(*arrays):
        return op.hyper_connection_pre(*arrays, **OPTIONS, implementation="triton")

    def post(*arrays):
        return op.hyper_connection_post(*arrays, implementation="triton")

    assert launches(boundary, streams, out, *gates, *weights) == 2
    assert launches(pre, streams, *weights) == 2
    assert launches(post, streams, out, *gates) == 1
