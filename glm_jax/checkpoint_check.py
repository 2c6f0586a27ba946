"""Compares a checkpoint's tensors with what a configuration needs, before anything is read."""

import dataclasses
from typing import Any

from glm_jax.checkpoint_files import CheckpointFiles
from glm_jax.checkpoint_layout import VISION_PREFIX, vision_tensors
from glm_jax.config import Config
from glm_jax.leaf_reading import Form, LeafPlan, Placement, plan_dtype
from glm_jax.parameter_layers import abstract
from glm_jax.parameter_spec import SCALE_SUFFIX, ParameterSpec, block_grid, is_spec, named_leaves
from glm_jax.safetensors_file import CheckpointError, TensorEntry, listed

_FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")


@dataclasses.dataclass(frozen=True)
class CheckedTensors:
    """Every leaf's plan in tree order, and the names of the tensors that no leaf uses."""

    plans: tuple[LeafPlan, ...]
    skipped: tuple[str, ...]
    skipped_bytes: int


def check_tensors(config: Config, files: CheckpointFiles, dtype: Any, placement: Placement) -> CheckedTensors:
    """Matches the folder's tensors to the leaves of the parameter tree, each tensor used exactly once.

    A weight is fp8 exactly when its `_scale_inv` sibling is there, whatever the configuration says.

    Raises:
        CheckpointError: lists every missing, unexpected, misshapen and wrongly typed tensor.
    """
    check = _Check(files)
    plans = tuple(
        check.leaf(config, path, spec, dtype, placement)
        for path, spec in named_leaves(abstract(config), is_spec).items()
    )
    skipped = check.vision(config)
    check.unexpected(config)
    if check.problems:
        raise CheckpointError(f"{files.folder}: {len(check.problems)} problems:{listed(check.problems)}")
    size = sum(files.entries[name].stop - files.entries[name].start for name in skipped)
    return CheckedTensors(plans, skipped, size)


class _Check:
    def __init__(self, files: CheckpointFiles) -> None:
        self.files = files
        self.problems: dict[str, None] = {}  # ordered; a tensor two leaves read is named once
        self.used: set[str] = set()

    def leaf(
        self, config: Config, path: str, spec: ParameterSpec, dtype: Any, placement: Placement
    ) -> LeafPlan:
        scaled, disk_dtypes = set(), {}
        for source in spec.sources:
            name = self.files.disk_name(source.name)
            is_scaled = name + SCALE_SUFFIX in self.files.entries
            scaled.add(is_scaled)
            entry = self.tensor(name, source.shape, ("F8_E4M3",) if is_scaled else _FLOAT_DTYPES)
            if is_scaled:
                self.tensor(name + SCALE_SUFFIX, block_grid(source.shape), ("F32",))
            if entry is not None:
                disk_dtypes[entry.dtype] = name
        form: Form = "plain"
        if True in scaled:
            keeps = spec.block_scaled and False not in scaled and placement.keeps_blocks(spec)
            form = "block_scaled" if keeps else "dequantized"
        elif dtype is None and len(disk_dtypes) > 1:
            names = ", ".join(f"{name} {found}" for found, name in disk_dtypes.items())
            self.problems[f"{path}: dtype=None needs one dtype on disk, found {names}"] = None
        disk = next(iter(disk_dtypes), "BF16")
        return LeafPlan(spec, form, plan_dtype(spec, form, dtype, disk, config.dtype))

    def tensor(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> TensorEntry | None:
        self.used.add(name)
        entry = self.files.entries.get(name)
        if entry is None:
            self.problems[f"{name}: missing, expected {_either(dtypes)} {list(shape)}"] = None
            return None
        if entry.shape != shape:
            self.problems[f"{name}: shape {list(entry.shape)}, expected {list(shape)}"] = None
        if entry.dtype not in dtypes:
            reason = ""
            if entry.dtype == "F8_E4M3":
                reason = f" (fp8 needs {name}{SCALE_SUFFIX})"
            elif dtypes == ("F8_E4M3",):
                reason = f" (there is a {name}{SCALE_SUFFIX})"
            self.problems[f"{name}: dtype {entry.dtype}, expected {_either(dtypes)}{reason}"] = None
        return entry

    def vision(self, config: Config) -> tuple[str, ...]:
        """The vision tower may be absent as a whole, but not in part."""
        if config.vision is None or not any(name.startswith(VISION_PREFIX) for name in self.files.entries):
            return ()
        described = vision_tensors(config.vision)
        for name, (shape, _) in described.items():
            self.tensor(name, shape, _FLOAT_DTYPES)
        return tuple(described)

    def unexpected(self, config: Config) -> None:
        mtp = f"{self.files.text_prefix}layers.{config.num_layers}."
        for name, entry in self.files.entries.items():
            if name not in self.used:
                self.problems[f"{name}: unexpected, {entry.dtype} {list(entry.shape)}"] = None
        if config.num_mtp_layers and not any(name.startswith(mtp) for name in self.files.entries):
            self.problems[
                f"{mtp}*: the checkpoint has no such layer, but config.json says "
                f"num_nextn_predict_layers={config.num_mtp_layers} (0 loads it without)"
            ] = None


def _either(dtypes: tuple[str, ...]) -> str:
    return " or ".join(dtypes)
