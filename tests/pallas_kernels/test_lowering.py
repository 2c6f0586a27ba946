"""Every shipped kernel configuration lowers to Triton for CUDA and for ROCm, on a machine without a GPU.

Interpret mode accepts what the GPU lowering refuses (blocks that are no power of two, values that are
sliced), so the kernels' cases, which the AMD gate compiles, are lowered here under the installed jax.
"""

from __future__ import annotations

import contextlib

import jax
import pytest

from tests.amd import gate

TARGETS = {"H200": ("cuda", "NVIDIA H200"), "MI355X": ("rocm", "gfx950"), "MI300X": ("rocm", "gfx942")}


def target_device(kind):
    """From jax 0.11 on, lowering asks the context's mesh for the kind of device; before, it does not care."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    try:
        device = jax.sharding.AbstractDevice(kind, None, "gpu")
    except TypeError:  # jax 0.10 has no platform argument, and needs none of this
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", gate.cases(), ids=lambda case: case.name)
def test_case_lowers(case, target):
    platform, kind = TARGETS[target]
    with target_device(kind):
        lowered = jax.jit(case.function).trace(*case.arguments).lower(lowering_platforms=(platform,))
    text = lowered.as_text()
    assert "__gpu$xla.gpu.triton" in text
    for kernel in case.dots:
        assert f'name = "{kernel}"' in text
