"""Hyper-connections in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hyper_connection as op
from tests.pallas_kernels import stream_oracles as oracle

OPTIONS = {"norm_eps": 1e-5, "hc_eps": 1e-6, "sinkhorn_iterations": 20}
ROUNDING = 1e-13  # values of order 1


def problem(sharpness: float = 1.0):
    random = np.random.default_rng(0)
    n, dim = 4, 20
    return (
        random.normal(size=(5, n, dim)),
        random.normal(size=(n * (2 + n), n * dim)) / (n * dim) ** 0.5,
        random.normal(size=n * (2 + n)),
        np.array([0.7, 1.2, 0.9]) * sharpness,
        random.normal(size=(5, dim)),
    )


@pytest.mark.parametrize("sharpness", [1.0, 30.0])
def test_is_float64(sharpness: float):
    *arguments, out = problem(sharpness)
    found = op.hyper_connection_pre(*map(jnp.asarray, arguments), **OPTIONS)
    for got, wanted in zip(found, oracle.pre(*arguments, 1e-5, 1e-6, 20), strict=True):
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, wanted, atol=ROUNDING * 10 * sharpness, rtol=0)
    updated = op.hyper_connection_post(jnp.asarray(arguments[0]), jnp.asarray(out), *found[1:])
    assert updated.dtype == jnp.float64
    wanted = oracle.post(arguments[0], out, *found[1:])
    np.testing.assert_allclose(updated, wanted, atol=ROUNDING * 10, rtol=0)
    boundary = op.hyper_connection_post_pre(
        jnp.asarray(arguments[0]), jnp.asarray(out), *found[1:], *map(jnp.asarray, arguments[1:]), **OPTIONS
    )
    np.testing.assert_array_equal(boundary[0], updated)


def test_gradients():
    """Against central differences: their error is about 1e-9 here."""
    inputs = tuple(map(jnp.asarray, problem()))

    def loss(streams, fn, base, scale, out):
        hidden, post, comb = op.hyper_connection_pre(streams, fn, base, scale, **OPTIONS)
        return jnp.sin(hidden).sum() + jnp.sin(op.hyper_connection_post(streams, out, post, comb)).sum()

    gradients = jax.jit(jax.grad(loss, argnums=tuple(range(5))))(*inputs)
    evaluate = jax.jit(loss)
    for index, gradient in enumerate(gradients):
        direction = jax.random.normal(jax.random.key(index), gradient.shape)
        step = 1e-5 / jnp.linalg.norm(direction)
        ends = [
            evaluate(*(v + sign * step * direction if i == index else v for i, v in enumerate(inputs)))
            for sign in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-6)
