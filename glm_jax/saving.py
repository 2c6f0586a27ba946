"""`save`: a model back to the Hugging Face layout, whole or not at all."""

import contextlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from glm_jax.checkpoint_files import INDEX_NAME, CheckpointFiles
from glm_jax.checkpoint_layout import VISION_PREFIX
from glm_jax.config import Config, read_json
from glm_jax.config_writing import to_hugging_face
from glm_jax.loading import Model
from glm_jax.locating import TEXT_PATTERNS
from glm_jax.parameter_layers import abstract
from glm_jax.parameter_spec import SCALE_SUFFIX, ParameterSpec, block_grid, is_spec, named_leaves
from glm_jax.parameter_tree import Params
from glm_jax.quantization import BlockScaled
from glm_jax.safetensors_file import DTYPE_NAMES, DTYPES, SafetensorsWriter

SHARD_BYTES = 5_000_000_000
Described = dict[str, tuple[tuple[int, ...], str]]


def save(
    model: Model, path: str | os.PathLike[str], *, overwrite: bool = False, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes config.json, safetensors shards and the tokenizer's files.

    A model loaded with `dtype=None` is written back byte for byte per tensor; tensors that loading skipped
    (the vision tower) are copied from `model.source`; fp8 tensors that loading had to dequantise (it says so)
    are written as they are in memory. The folder appears under its name only once it is complete.

    Args:
        model: the model; `source` None writes no tokenizer files.
        path: the folder to make.
        overwrite: replace an existing checkpoint folder.
        shard_bytes: most bytes of tensors in one file; a larger tensor gets a file of its own.

    Raises:
        FileExistsError: `path` exists and is not to be, or not fit to be, replaced.
        FileNotFoundError: the folder the model came from is gone.
        ValueError: the parameters are not those of the configuration.
    """
    if model.source is not None and not model.source.is_dir():
        raise FileNotFoundError(
            f"{model.source} is gone; its tokenizer and skipped tensors were to be copied"
        )
    with new_folder(Path(path), overwrite=overwrite) as folder:
        files = _source_files(model.source)
        _write_tensors(model, files, folder, shard_bytes)
        base = read_json(model.source / "config.json") if model.source else None
        write_text_files(model, folder, base)


@contextlib.contextmanager
def new_folder(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its name on success and vanishes on failure."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        if not overwrite:
            raise FileExistsError(f"{path} exists; overwrite=True replaces a checkpoint")
        if not (path / "config.json").is_file():
            raise FileExistsError(f"{path} is no checkpoint folder (no config.json), so it is not replaced")
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(4)
    temporary = path.parent / f".{path.name}.{mark}.partial"
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():
            retired = path.parent / f".{path.name}.{mark}.retired"
            path.rename(retired)
            try:
                temporary.rename(path)
            except OSError:
                retired.rename(path)
                raise
            shutil.rmtree(retired)
        else:
            temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text_files(model: Model, folder: Path, base: Mapping[str, Any] | None) -> None:
    """config.json, and copies of the source's tokenizer, template and generation files."""
    dtype = str(model.params.embed_tokens.dtype)
    raw = to_hugging_face(model.config, dtype=dtype, base=base)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    if model.source is not None:
        for pattern in TEXT_PATTERNS:
            for file in sorted(model.source.glob(pattern)):
                if file.name not in ("config.json", INDEX_NAME):
                    shutil.copyfile(file, folder / file.name)


def checked_leaves(config: Config, params: Params) -> dict[str, tuple[ParameterSpec, Any]]:
    """`{path: (spec, leaf)}`.

    Raises:
        ValueError: the tree or a shape is not that of the configuration.
    """
    specs = named_leaves(abstract(config), is_spec)
    leaves = named_leaves(params, lambda node: isinstance(node, BlockScaled))
    if specs.keys() != leaves.keys():
        raise ValueError(f"parameters do not fit the configuration: {sorted(specs.keys() ^ leaves.keys())}")
    for name, leaf in leaves.items():
        if leaf.shape != specs[name].shape:
            raise ValueError(f"{name}: shape {leaf.shape}, the configuration says {specs[name].shape}")
    return {name: (specs[name], leaf) for name, leaf in leaves.items()}


def _source_files(source: Path | None) -> CheckpointFiles | None:
    if source is None or not any(source.glob("*.safetensors")):
        return None
    return CheckpointFiles(source)


def _write_tensors(model: Model, files: CheckpointFiles | None, folder: Path, shard_bytes: int) -> None:
    leaves = checked_leaves(model.config, model.params)
    named = files.disk_name if files else lambda name: name
    described: Described = {}
    for spec, leaf in leaves.values():
        for source in spec.sources:
            described[named(source.name)] = (source.shape, DTYPE_NAMES[np.dtype(leaf.dtype)])
            if isinstance(leaf, BlockScaled):
                described[named(source.name) + SCALE_SUFFIX] = (block_grid(source.shape), "F32")
    skipped: list[str] = []
    if files and model.config.vision:
        skipped = [name for name in files.entries if name.startswith(VISION_PREFIX)]
        described.update((name, (files.entries[name].shape, files.entries[name].dtype)) for name in skipped)

    shards = _shards(described, shard_bytes)
    with contextlib.ExitStack() as stack:
        writer_of: dict[str, SafetensorsWriter] = {}
        for file_name, names in shards.items():
            tensors = {name: described[name] for name in names}
            writer = stack.enter_context(SafetensorsWriter(folder / file_name, tensors))
            writer_of.update(dict.fromkeys(names, writer))
        for name, tensor in _tensors(leaves):
            writer_of[named(name)].write(named(name), tensor)
        for name in skipped:
            assert files is not None
            writer_of[name].write(name, files.tensor(name))
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(_size(*entry) for entry in described.values())},
            "weight_map": {name: file_name for file_name, names in shards.items() for name in names},
        }
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _tensors(leaves: Mapping[str, tuple[ParameterSpec, Any]]) -> Iterator[tuple[str, np.ndarray]]:
    """Disk tensors in the order in which they become complete; one leaf at a time is on the host."""
    unfinished: dict[str, tuple[np.ndarray, int]] = {}
    for spec, leaf in leaves.values():
        values = np.asarray(jax.device_get(leaf.values if isinstance(leaf, BlockScaled) else leaf))
        scales = np.asarray(jax.device_get(leaf.scales)) if isinstance(leaf, BlockScaled) else None
        for source in spec.sources:
            part = values[source.leaf_index]
            tensor, missing = unfinished.pop(
                source.name, (np.empty(source.shape, values.dtype), math.prod(source.shape))
            )
            tensor.reshape(source.view)[source.disk_index] = part
            if missing > part.size:
                unfinished[source.name] = (tensor, missing - part.size)
                continue
            yield source.name, tensor
            if scales is not None:
                yield source.name + SCALE_SUFFIX, scales[source.leaf_index]


def _shards(described: Described, limit: int) -> dict[str, list[str]]:
    """`{file name: tensor names}`, filled in order."""
    groups: list[list[str]] = [[]]
    room = limit
    for name, entry in described.items():
        size = _size(*entry)
        if size > room and groups[-1]:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": names
        for number, names in enumerate(groups, start=1)
    }


def _size(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize
