"""Every shipped kernel configuration compiles for gfx950 and gfx942: no spills, matrix units used, LDS fits."""

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
    """A kernel that holds far more values than there are registers must be reported."""

    def kernel(x_ref, out_ref):
        tile = x_ref[...]
        total = tile
        for i in range(1, 5):  # products need both operands whole, so nothing can be streamed
            total = triton.dot(total, tile + i, trans_b=True)
        out_ref[...] = total + tile

    def function(x):
        shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
        launch = triton.Launch(num_warps=1, num_stages=1)
        call = triton.pallas_call(kernel, out_shape=shape, grid=(1,), cuda=launch, rocm=launch, name="greedy")
        return call(x)

    case = gate.Case("greedy", function, (jax.ShapeDtypeStruct((256, 256), jnp.float32),), chips=("gfx950",))
    assert any("spills" in fault for row in gate.check(case) for fault in row.faults)
