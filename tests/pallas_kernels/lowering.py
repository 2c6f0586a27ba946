"""Lowers a function for a GPU that need not be there: its Pallas-Triton kernels become Triton IR."""

import contextlib
from collections.abc import Callable, Sequence

import jax
from jax.sharding import AbstractMesh

DEVICE_KINDS = {"cuda": "NVIDIA H200", "rocm": "gfx950"}


def target(platform: str) -> contextlib.AbstractContextManager:
    """A context in which lowering for "cuda" or "rocm" finds its kind of device."""
    device = jax.sharding.AbstractDevice(DEVICE_KINDS[platform], None, "gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def lower(function: Callable, arguments: Sequence[jax.ShapeDtypeStruct], platform: str) -> str:
    """The StableHLO text of the function for "cuda" or "rocm"."""
    with target(platform):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
