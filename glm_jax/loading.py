"""`load`: a checkpoint folder, a Hub id, an Orbax folder or "tiny" -> `Model`."""

import dataclasses
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from glm_jax.checkpoint_check import check_tensors
from glm_jax.checkpoint_files import CheckpointFiles
from glm_jax.config import Config, load_config
from glm_jax.config_schema import FP8_BLOCK
from glm_jax.leaf_reading import Placement, read_leaf
from glm_jax.locating import ORBAX_FOLDER, locate
from glm_jax.parameter_layers import abstract
from glm_jax.parameter_spec import is_spec
from glm_jax.parameter_tree import Params
from glm_jax.sharding import TENSOR_PARALLEL, Rules, check_mesh

if TYPE_CHECKING:
    from glm_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
LOAD_DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model. `source` is the folder it came from, None for one made in memory."""

    config: Config
    params: Params
    tokenizer: "Tokenizer | None" = None
    source: Path | None = None


def load(
    path: str | os.PathLike[str],
    dtype: str | None = "bfloat16",
    mesh: Mesh | None = None,
    *,
    rules: Rules = TENSOR_PARALLEL,
) -> Model:
    """Loads a checkpoint; either everything is loaded or an error is raised and nothing is.

    Args:
        path: a folder in the Hugging Face layout or one written by `glm_jax.checkpoint`, a Hub id
            ("owner/name"; `HF_HUB_OFFLINE` is respected), or "tiny", the checkpoint shipped with the package.
        dtype: of the parameters in memory: "bfloat16", "float16", "float32", "float64" (with
            jax_enable_x64), or None for the dtypes on disk. Leaves that must not be narrower than float32
            stay so; block-scaled fp8 weights stay fp8 and are dequantised at use.
        mesh: devices to spread the parameters over by `rules`; None for the default device.
        rules: logical axis -> mesh axis.

    Returns:
        The model; its tokenizer is None when the folder has none.

    Raises:
        FileNotFoundError: there is no such folder, or the Hub does not have it.
        ConfigError: config.json asks for something that cannot be run.
        CheckpointError: truncated or corrupt files, or a list of every missing, unexpected, misshapen or
            wrongly typed tensor.
        ValueError: an unknown dtype, or a mesh that the model cannot be laid out on.
    """
    if dtype is not None:
        if str(dtype) not in LOAD_DTYPES:
            raise ValueError(f"dtype={dtype!r}: supported are {list(LOAD_DTYPES)} and None")
        if dtype == "float64" and not jax.config.read("jax_enable_x64"):
            raise ValueError("dtype='float64' needs jax.config.update('jax_enable_x64', True) before loading")
    folder = locate(path)
    if (folder / ORBAX_FOLDER).is_dir():
        from glm_jax.checkpoint import restore

        config, params = restore(folder, dtype=dtype, mesh=mesh, rules=rules)
        return Model(config, params, _tokenizer(folder), folder)
    config = load_config(folder)
    if mesh is not None:
        check_mesh(config, mesh, rules)
    params, quantization = read_params(config, CheckpointFiles(folder), dtype, Placement(mesh, rules))
    config = dataclasses.replace(config, quantization=quantization)
    return Model(config, params, _tokenizer(folder), folder)


def read_params(
    config: Config, files: CheckpointFiles, dtype: str | None, placement: Placement
) -> tuple[Params, int | None]:
    """Reads all parameters, one leaf at a time; also returns the fp8 block size, None when no leaf is fp8."""
    checked = check_tensors(config, files, dtype, placement)
    if checked.skipped:
        logger.warning(
            "%s: skipped the %d tensors of the vision tower (%.3g GB): only text is computed",
            files.folder, len(checked.skipped), checked.skipped_bytes / 1e9,
        )  # fmt: skip
    dequantized = sum(plan.form == "dequantized" for plan in checked.plans)
    if dequantized:
        logger.warning(
            "%s: %d fp8 parameters were dequantised: they cannot keep their 128 x 128 blocks in this layout",
            files.folder, dequantized,
        )  # fmt: skip
    leaves = []
    total = sum(plan.bytes for plan in checked.plans)
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"loading {files.folder.name}") as bar:
        for plan in checked.plans:
            leaves.append(read_leaf(plan, files, placement))
            files.release()  # or the mapped pages would add up to a second copy of the model
            bar.update(plan.bytes)
    params = jax.tree.unflatten(jax.tree.structure(abstract(config), is_leaf=is_spec), leaves)
    block = FP8_BLOCK if any(plan.form == "block_scaled" for plan in checked.plans) else None
    return params, block


def _tokenizer(folder: Path) -> "Tokenizer | None":
    from glm_jax.tokenizer import load_tokenizer

    return load_tokenizer(folder)
