"""The single declarative parameter tree, and what follows from it alone.

`abstract(config)` is the only place that knows a parameter's shape, dtype, logical axes and names on disk.
Initialisation, sharding, loading, saving, the memory table and the tests derive from it.
"""

from glm_jax.checkpoint_layout import checkpoint_tensors, vision_tensors
from glm_jax.parameter_init import init
from glm_jax.parameter_layers import TEXT_PREFIX, abstract
from glm_jax.parameter_spec import ParameterSpec, Source, is_spec, named_leaves
from glm_jax.parameter_tree import (
    DenseMlp,
    HyperConnection,
    Indexer,
    Kda,
    Layer,
    Mla,
    Moe,
    MtpLayer,
    Params,
)

__all__ = [
    "TEXT_PREFIX",
    "DenseMlp",
    "HyperConnection",
    "Indexer",
    "Kda",
    "Layer",
    "Mla",
    "Moe",
    "MtpLayer",
    "ParameterSpec",
    "Params",
    "Source",
    "abstract",
    "checkpoint_tensors",
    "init",
    "is_spec",
    "named_leaves",
    "vision_tensors",
]
