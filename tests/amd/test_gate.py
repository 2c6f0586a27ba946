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


@pytest.mark.parametrize("name", ["hyper-connection boundary, 8192 tokens", "KDA prefill 1024 x 8 heads"])
def test_case_on_nvidia(name, record_rows):
    """The same cases compile for an H200, with tensor cores and without a stack."""
    (case,) = [case for case in gate.cases() if case.name == name]
    rows = gate.check(case, ("sm_90",))
    record_rows(rows)
    assert rows and not [row for row in rows if row.faults]


@pytest.mark.parametrize("chip", ["gfx950", "sm_90"])
def test_the_gate_sees_spills(chip):
    """Two tiles of 256 registers a lane (512 on NVIDIA) that live at once must be reported."""

    def kernel(x_ref, out_ref):
        tile = x_ref[...]
        product = triton.dot(tile, tile) if chip == "gfx950" else tile  # FMA products compile for minutes
        out_ref[...] = product * tile + jnp.exp(tile).T

    def function(x):
        launch = triton.Launch(num_warps=1, num_stages=1)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return triton.pallas_call(
            kernel, out_shape=shape, grid=(1,), cuda=launch, rocm=launch, name="greedy"
        )(x)

    case = gate.Case("greedy", function, (jax.ShapeDtypeStruct((128, 128), jnp.float32),), chips=(chip,))
    words = ("spills", "stack")
    assert any(fault.startswith(words) for row in gate.check(case) for fault in row.faults)
