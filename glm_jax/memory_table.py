"""How much memory a configuration's parameters take, in total and on each device of a mesh."""

import dataclasses
import math
from collections.abc import Mapping

from glm_jax.config import Config
from glm_jax.parameter_layers import abstract
from glm_jax.parameter_spec import DTYPE_BYTES, ParameterSpec, is_spec, named_leaves
from glm_jax.sharding import TENSOR_PARALLEL, Rules, partition_spec


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """One group of parameters at the dtypes on disk; block scales count as bytes, not as parameters."""

    group: str
    parameters: int
    total_bytes: int
    device_bytes: int


def memory_table(
    config: Config, axis_sizes: Mapping[str, int], rules: Rules = TENSOR_PARALLEL
) -> list[MemoryRow]:
    """Parameters and bytes by group, for a mesh of axis sizes such as `{"tp": 8}`; vision is not counted."""
    rows: dict[str, MemoryRow] = {}
    for path, spec in named_leaves(abstract(config), is_spec).items():
        parts = math.prod(axis_sizes.get(axis, 1) for axis in partition_spec(spec, rules) if axis is not None)
        size = _bytes(spec)
        old = rows.get(_group(path, config), MemoryRow("", 0, 0, 0))
        rows[_group(path, config)] = MemoryRow(
            _group(path, config),
            old.parameters + math.prod(spec.shape),
            old.total_bytes + size,
            old.device_bytes + size // parts,
        )
    return list(rows.values())


def _bytes(spec: ParameterSpec) -> int:
    scales = math.prod(spec.scales_shape) * DTYPE_BYTES["F32"] if spec.dtype == "F8_E4M3" else 0
    return math.prod(spec.shape) * DTYPE_BYTES[spec.dtype] + scales


def _group(path: str, config: Config) -> str:
    parts = path.split(".")
    if parts[0] == "mtp":
        return "mtp"
    if parts[0] != "layers":
        return parts[0]
    layer, part = int(parts[1]), parts[2]
    if part == "attention":
        return "indexer" if parts[3] == "indexer" else config.layer_kinds[layer]
    if part == "mlp":
        return f"{config.mlp_kinds[layer]}_{'experts' if parts[3] in ('gate_up', 'down') else parts[3]}"
    return "hyper_connection" if part.endswith("_hc") else "layer_norms"
