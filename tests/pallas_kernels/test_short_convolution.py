"""The short convolution's decode kernel, interpreted or on a GPU, against the XLA reference.

The reference is pinned to a numpy loop by tests/float64. Both sum four float32 products in the same order,
so they may differ by a rounding or two: 1e-6. States are copies and must be equal.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.short_convolution import short_convolution_decode
from tests.pallas_kernels.device import KERNEL


@pytest.mark.parametrize("window", [1, 3, 8])
def test_decode_kernel_equals_the_reference_and_touches_nothing_else(window):
    rng = np.random.default_rng(window)
    layers, slot_count, channels, taps, layer = 2, 8, 192, 4, 1
    slots = jnp.array([6, -1, 0, 3, 2], jnp.int32)
    accepted = jnp.array([window, window, 0, 1, (window + 1) // 2], jnp.int32)
    publish_after = jnp.array([1, 1, -1, 1, (window + 1) // 2], jnp.int32)
    publish_slots = jnp.array([4, 5, -1, -1, 1], jnp.int32)  # row 1 is padding: slot 5 must stay untouched
    state = np.full((layers, slot_count, taps - 1 + window, channels), np.nan, np.float32)
    state[:, [6, 0, 3, 2]] = rng.normal(size=(layers, 4, taps - 1 + window, channels))
    x = rng.normal(size=(5, window, channels)).astype(np.float32)
    x[1] = np.nan
    weight = jnp.asarray(rng.normal(size=(channels, taps)), jnp.float32)

    def run(implementation):
        return jax.jit(
            lambda x, state: short_convolution_decode(
                x,
                weight,
                state,
                layer,
                slots,
                accepted,
                publish_after=publish_after,
                publish_slots=publish_slots,
                implementation=implementation,
            )
        )(x, state)

    (expected, expected_state), (y, after) = run("xla"), run(KERNEL)
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(after, expected_state)
    assert np.isfinite(y).all()
