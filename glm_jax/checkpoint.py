"""Orbax checkpoints of a model: save, and restore onto any mesh.

The folder holds config.json, the tokenizer's files and, under `params/`, an Orbax tree of arrays keyed by
dotted leaf path ("layers.3.attention.o_proj"; `.values` and `.scales` for fp8 leaves), so that the format
does not depend on the classes of the parameter tree.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint
from jax.sharding import Mesh

from glm_jax.config import Config, load_config, read_json
from glm_jax.config_schema import FP8_BLOCK
from glm_jax.leaf_reading import Placement, plan_dtype
from glm_jax.loading import Model
from glm_jax.locating import ORBAX_FOLDER
from glm_jax.parameter_layers import abstract
from glm_jax.parameter_spec import ParameterSpec, is_spec, named_leaves
from glm_jax.parameter_tree import Params
from glm_jax.quantization import BlockScaled, dequantize
from glm_jax.safetensors_file import DTYPE_NAMES, CheckpointError, listed
from glm_jax.saving import checked_leaves, new_folder, write_text_files
from glm_jax.sharding import TENSOR_PARALLEL, Rules, check_mesh

_PARTS = (".values", ".scales")


def save(model: Model, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Writes a model, sharded or not, as an Orbax folder that `glm_jax.load` reads.

    Tensors that loading skipped (the vision tower) are not kept: `glm_jax.save` keeps them.

    Raises:
        FileExistsError: `path` exists and is not to be, or not fit to be, replaced.
        ValueError: the parameters are not those of the configuration.
    """
    checked_leaves(model.config, model.params)
    with new_folder(Path(path), overwrite=overwrite) as folder:
        base = read_json(model.source / "config.json") if model.source else None
        write_text_files(model, folder, base)
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save((folder / ORBAX_FOLDER).absolute(), named_leaves(model.params))


def restore(
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    rules: Rules = TENSOR_PARALLEL,
) -> tuple[Config, Params]:
    """Reads an Orbax folder onto the default device or a mesh, whatever it was saved from.

    Args:
        path: a folder written by `save`.
        dtype: as in `glm_jax.load`; None keeps the saved dtypes.
        mesh: devices to spread the parameters over by `rules`.
        rules: logical axis -> mesh axis.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointError: lists every missing, unexpected or misshapen leaf.
        ValueError: a mesh that the model cannot be laid out on.
    """
    folder = Path(path)
    config = load_config(folder)
    if mesh is not None:
        check_mesh(config, mesh, rules)
    specs = named_leaves(abstract(config), is_spec)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        tree_folder = (folder / ORBAX_FOLDER).absolute()
        saved = checkpointer.metadata(tree_folder).item_metadata.tree
        _check(folder, specs, saved)
        placement = Placement(mesh, rules)
        wanted = {
            name: wanted
            for path, spec in specs.items()
            for name, wanted in _wanted(path, spec, saved, dtype, placement)
        }
        arrays = checkpointer.restore(tree_folder, wanted)
    leaves = [_leaf(path, spec, arrays, config, dtype, placement) for path, spec in specs.items()]
    params = jax.tree.unflatten(jax.tree.structure(abstract(config), is_leaf=is_spec), leaves)
    quantized = any(isinstance(leaf, BlockScaled) for leaf in leaves)
    return dataclasses.replace(config, quantization=FP8_BLOCK if quantized else None), params


def _check(folder: Path, specs: dict[str, ParameterSpec], saved: dict[str, Any]) -> None:
    problems, used = [], set()
    for path, spec in specs.items():
        shapes = {path: spec.shape}
        if path not in saved and path + _PARTS[0] in saved:
            shapes = dict(zip((path + part for part in _PARTS), (spec.shape, spec.scales_shape), strict=True))
        for name, shape in shapes.items():
            used.add(name)
            if name not in saved:
                problems.append(f"{name}: missing, expected {list(shape)}")
            elif tuple(saved[name].shape) != shape:
                problems.append(f"{name}: shape {list(saved[name].shape)}, expected {list(shape)}")
    problems += [f"{name}: unexpected" for name in saved if name not in used]
    if problems:
        raise CheckpointError(f"{folder}: {len(problems)} problems:{listed(problems)}")


def _wanted(
    path: str, spec: ParameterSpec, saved: dict[str, Any], dtype: str | None, placement: Placement
) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    """What Orbax is to restore for a leaf: names, shapes, dtypes and shardings."""
    sharding = placement.sharding(spec)
    if path in saved:
        disk = DTYPE_NAMES[jnp.dtype(saved[path].dtype)]
        target = plan_dtype(spec, "plain", dtype, disk, disk)
        return [(path, jax.ShapeDtypeStruct(spec.shape, target, sharding=sharding))]
    if not placement.keeps_blocks(spec):
        sharding = None  # restored whole, dequantised, then spread
    return [
        (path + part, jax.ShapeDtypeStruct(shape, saved[path + part].dtype, sharding=sharding))
        for part, shape in zip(_PARTS, (spec.shape, spec.scales_shape), strict=True)
    ]


def _leaf(
    path: str,
    spec: ParameterSpec,
    arrays: dict[str, jax.Array],
    config: Config,
    dtype: str | None,
    placement: Placement,
) -> jax.Array | BlockScaled:
    if path in arrays:
        return arrays[path]
    leaf = BlockScaled(*(arrays[path + part] for part in _PARTS))
    if placement.keeps_blocks(spec):
        return leaf
    return jax.device_put(dequantize(leaf, dtype or config.dtype), placement.sharding(spec))
