"""Every shipped kernel configuration compiles for gfx950 and gfx942 as the gate demands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import triton
from tests.amd import gate


@pytest.mark.parametrize("case", gate.cases(), ids=lambda case: case.name)
def test_case(case, record_rows):
    rows = gate.check(case)
    record_rows(rows)
    assert rows, "the case lowers to no kernel"
    assert not [row for row in rows if row.faults]


def test_the_gate_sees_spills():
    """A tile of 256 registers a lane, of which two live at once with their product, must be reported."""

    def kernel(x_ref, out_ref):
        tile = x_ref[...]
        out_ref[...] = triton.dot(tile, tile) * tile + jnp.exp(tile).T

    def function(x):
        launch = triton.Launch(num_warps=1, num_stages=1)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return triton.pallas_call(
            kernel, out_shape=shape, grid=(1,), cuda=launch, rocm=launch, name="greedy"
        )(x)

    case = gate.Case("greedy", function, (jax.ShapeDtypeStruct((128, 128), jnp.float32),), chips=("gfx950",))
    assert any("spills" in fault for row in gate.check(case) for fault in row.faults)
