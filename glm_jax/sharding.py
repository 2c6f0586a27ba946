"""Logical axes -> mesh axes: the one table that lays parameters out over devices.

A different layout is a different table and no other change.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm_jax.config import Config
from glm_jax.config_schema import FP8_BLOCK
from glm_jax.parameter_layers import abstract
from glm_jax.parameter_spec import ParameterSpec, is_spec, named_leaves
from glm_jax.quantization import BlockScaled

Rules = Mapping[str, str | None]

TENSOR_AXIS = "tp"
# MODEL.md g: heads, MLP widths and the vocabulary are split; everything a rank needs whole (latents, indexer,
# hyper-connections, router, norms, the low-rank halves in front of a split) is replicated.
TENSOR_PARALLEL: Rules = {
    "vocab": TENSOR_AXIS,
    "kda_heads": TENSOR_AXIS,
    "kda_channels": TENSOR_AXIS,
    "mla_heads": TENSOR_AXIS,
    "mla_query": TENSOR_AXIS,
    "mla_value": TENSOR_AXIS,
    "mlp": TENSOR_AXIS,
    "expert_mlp": TENSOR_AXIS,
    "experts": None,
    "embed": None,
    "streams_embed": None,
    "mtp_input": None,
    "hyper": None,
    "stack": None,
    "taps": None,
    "kda_dim": None,
    "mla_dim": None,
    "q_lora": None,
    "kv_lora": None,
    "index_query": None,
    "index_heads": None,
    "index_dim": None,
    "kpool": None,
    "router": None,
}
EXPERT_PARALLEL: Rules = {**TENSOR_PARALLEL, "experts": TENSOR_AXIS, "expert_mlp": None}


def partition_spec(spec: ParameterSpec, rules: Rules) -> PartitionSpec:
    """Mesh axes of a parameter's dimensions.

    Raises:
        ValueError: the rules do not know a logical axis, or put two dimensions on one mesh axis.
    """
    unknown = [axis for axis in spec.axes if axis not in rules]
    if unknown:
        raise ValueError(f"{spec.sources[0].name}: no sharding rule for logical axes {unknown}")
    mesh_axes = [rules[axis] for axis in spec.axes]
    used = [axis for axis in mesh_axes if axis is not None]
    if len(used) != len(set(used)):
        raise ValueError(f"{spec.sources[0].name}: axes {spec.axes} map to {mesh_axes}, one mesh axis twice")
    return PartitionSpec(*mesh_axes)


def check_mesh(config: Config, mesh: Mesh, rules: Rules = TENSOR_PARALLEL) -> None:
    """Checks that a model can be laid out on a mesh.

    Raises:
        ValueError: lists every logical axis that the mesh cannot split into equal whole heads or columns.
    """
    problems: dict[str, None] = {}
    unit = {
        "kda_channels": config.kda_head_dim,
        "mla_query": config.qk_head_dim,
        "mla_value": config.v_head_dim,
    }
    for spec in named_leaves(abstract(config), is_spec).values():
        for size, axis, mesh_axis in zip(spec.shape, spec.axes, partition_spec(spec, rules), strict=True):
            if mesh_axis is None:
                continue
            if mesh_axis not in mesh.shape:
                raise ValueError(
                    f"mesh axes are {tuple(mesh.axis_names)}; the sharding rules need {mesh_axis!r}"
                )
            parts, wholes = mesh.shape[mesh_axis], size // unit.get(axis, 1)
            if wholes % parts:
                problems[f"{axis}: {wholes} is not a multiple of {parts} devices"] = None
    if problems:
        raise ValueError("the model does not fit the mesh: " + "; ".join(problems))


def scales_align(spec: ParameterSpec, mesh: Mesh, rules: Rules) -> bool:
    """Whether every shard of an fp8 leaf begins and ends at block edges, so that its scales split with it."""
    for size, mesh_axis in zip(spec.shape[-2:], partition_spec(spec, rules)[-2:], strict=True):
        if mesh_axis is not None and mesh.shape[mesh_axis] > 1 and size // mesh.shape[mesh_axis] % FP8_BLOCK:
            return False
    return True


def named_sharding(spec: ParameterSpec, mesh: Mesh, rules: Rules) -> NamedSharding:
    """Placement of a parameter, and of its block scales where it has them."""
    return NamedSharding(mesh, partition_spec(spec, rules))


def partition_specs(config: Config, params: Any, rules: Rules = TENSOR_PARALLEL) -> Any:
    """Tree like `params` with a `PartitionSpec` at every array: `in_specs` of a `jax.shard_map`.

    `params` may hold arrays or `jax.ShapeDtypeStruct`s; `BlockScaled` nodes get the same spec for both parts.
    """

    def of_leaf(spec: ParameterSpec, leaf: Any) -> Any:
        mesh_axes: Any = partition_spec(spec, rules)
        return BlockScaled(mesh_axes, mesh_axes) if isinstance(leaf, BlockScaled) else mesh_axes

    specs = abstract(config)
    return jax.tree.map(of_leaf, specs, params, is_leaf=is_spec)
