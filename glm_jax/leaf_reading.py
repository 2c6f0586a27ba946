"""Disk tensors -> one leaf of the parameter tree, on one device or spread over a mesh.

Reads only the bytes each shard needs, through the memory map, into one host buffer at a time.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from glm_jax.checkpoint_files import CheckpointFiles
from glm_jax.config_schema import FP8_BLOCK
from glm_jax.parameter_spec import SCALE_SUFFIX, ParameterSpec, Source
from glm_jax.quantization import BlockScaled
from glm_jax.safetensors_file import DTYPES
from glm_jax.sharding import Rules, named_sharding, scales_align

Form = Literal["plain", "block_scaled", "dequantized"]
Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """A leaf whose disk tensors were found to be right.

    `plain`: the values as they are. `block_scaled`: fp8 kept, with its scales. `dequantized`: fp8 on disk,
    but the leaf cannot stay fp8 (its shards cut through blocks, or only some of its tensors are fp8).
    """

    spec: ParameterSpec
    form: Form
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        """Size in memory without scales."""
        return math.prod(self.spec.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where leaves go: the default device, or a mesh with sharding rules."""

    mesh: Mesh | None
    rules: Rules

    def sharding(self, spec: ParameterSpec) -> Sharding | None:
        return None if self.mesh is None else named_sharding(spec, self.mesh, self.rules)

    def keeps_blocks(self, spec: ParameterSpec) -> bool:
        return self.mesh is None or scales_align(spec, self.mesh, self.rules)


def read_leaf(plan: LeafPlan, files: CheckpointFiles, placement: Placement) -> jax.Array | BlockScaled:
    """Reads one leaf; returns when it is on its devices and the host buffer is free again."""
    sharding = placement.sharding(plan.spec)

    def place(shape: tuple[int, ...], dtype: np.dtype, piece: Callable[[Source], np.ndarray]) -> jax.Array:
        def shard(index: Index) -> np.ndarray:
            return _gather(plan.spec.sources, shape, dtype, index, piece)

        return place_shards(shape, sharding, shard)

    if plan.form == "block_scaled":
        leaf: Any = BlockScaled(
            place(plan.spec.shape, plan.dtype, lambda source: _plain(files, source)),
            place(
                plan.spec.scales_shape,
                np.dtype(np.float32),
                lambda source: files.tensor(files.disk_name(source.name) + SCALE_SUFFIX),
            ),
        )
    elif plan.form == "dequantized":
        leaf = place(plan.spec.shape, plan.dtype, lambda source: _dequantized(files, source, plan.dtype))
    else:
        leaf = place(plan.spec.shape, plan.dtype, lambda source: _plain(files, source))
    return jax.block_until_ready(leaf)


def place_shards(
    shape: tuple[int, ...], sharding: Sharding | None, shard: Callable[[Index], np.ndarray]
) -> jax.Array:
    """An array made of `shard(index)` blocks, each read once and sent to every device that holds it.

    One block at a time: `jax.make_array_from_callback` would hold all of them on the host at once.
    """
    if sharding is None:
        return jax.device_put(shard(tuple(slice(0, size) for size in shape)))
    devices_of: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        devices_of.setdefault(bounds, []).append(device)
    arrays = []
    for bounds, devices in devices_of.items():
        block = shard(tuple(slice(*bound) for bound in bounds))
        arrays += [jax.block_until_ready(jax.device_put(block, device)) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _gather(
    sources: tuple[Source, ...],
    shape: tuple[int, ...],
    dtype: np.dtype,
    index: Index,
    piece: Callable[[Source], np.ndarray],
) -> np.ndarray:
    """The block `index` of a leaf of `shape`, filled from the sources that reach into it."""
    block = np.empty([part.stop - part.start for part in index], dtype)
    for source in sources:
        leading = len(source.leaf_index)
        stacked = index[:leading]
        if all(
            part.start <= position < part.stop
            for position, part in zip(source.leaf_index, stacked, strict=True)
        ):
            target = tuple(
                position - part.start for position, part in zip(source.leaf_index, stacked, strict=True)
            )
            block[target] = piece(source)[index[leading:]]
    return block


def _plain(files: CheckpointFiles, source: Source) -> np.ndarray:
    return files.tensor(files.disk_name(source.name)).reshape(source.view)[source.disk_index]


def _dequantized(files: CheckpointFiles, source: Source, dtype: np.dtype) -> np.ndarray:
    """The source's part of a tensor, times its scales where it has them, multiplied in at least float32."""
    name = files.disk_name(source.name)
    if name + SCALE_SUFFIX not in files.entries:
        return _plain(files, source)
    wide = jnp.promote_types(dtype, jnp.float32)
    values = files.tensor(name).astype(wide)
    rows, columns = values.shape
    scales = files.tensor(name + SCALE_SUFFIX).astype(wide)
    scales = np.repeat(np.repeat(scales, FP8_BLOCK, axis=0)[:rows], FP8_BLOCK, axis=1)[:, :columns]
    return (values * scales).reshape(source.view)[source.disk_index]


def plan_dtype(spec: ParameterSpec, form: Form, dtype: Any, disk: str, fallback: str) -> np.dtype:
    """Dtype of a leaf in memory.

    Args:
        spec: the leaf.
        form: how it is kept; block-scaled values stay fp8 whatever `dtype` is.
        dtype: asked for by the caller, None for the one on disk.
        disk: the safetensors dtype name on disk.
        fallback: dtype of a dequantised leaf when `dtype` is None.
    """
    if form == "block_scaled":
        return DTYPES["F8_E4M3"]
    if dtype is None:
        return jnp.dtype(fallback) if form == "dequantized" else DTYPES[disk]
    return jnp.promote_types(dtype, jnp.float32) if spec.float32_island else jnp.dtype(dtype)
