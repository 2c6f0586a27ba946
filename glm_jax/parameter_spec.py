"""What one parameter is: shape, dtype on disk, logical axes, and where its elements lie in the checkpoint.

A `Source` is reversible: the same line says how to read a leaf from disk tensors and how to write them back.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax

from glm_jax.config_schema import FP8_BLOCK

DiskDtype = Literal["F8_E4M3", "BF16", "F32"]
Initializer = Literal["ones", "zeros", "normal", "embedding", "decay_rate", "decay_time"]
DTYPE_BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
SCALE_SUFFIX = "_scale_inv"


@dataclasses.dataclass(frozen=True)
class Source:
    """`leaf[leaf_index] = disk.reshape(view)[disk_index]`, and back.

    `leaf_index` fixes leading axes of the leaf (the position in a stack); `disk_index` selects a part of the
    disk tensor (one half of a fused projection). A plain tensor has an empty `leaf_index`, `view` equal to
    `shape` and an empty `disk_index`.
    """

    name: str
    shape: tuple[int, ...]
    leaf_index: tuple[int, ...] = ()
    view: tuple[int, ...] = ()
    disk_index: tuple[slice, ...] = ()

    def __post_init__(self) -> None:
        if not self.view:
            object.__setattr__(self, "view", self.shape)
        if math.prod(self.view) != math.prod(self.shape):
            raise ValueError(f"{self.name}: view {self.view} does not hold the elements of {self.shape}")


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """One leaf of the parameter tree. It is itself a pytree leaf.

    `axes` names the logical axis of every dimension (see `glm_jax.sharding`). `float32_island` leaves are
    never narrower than float32. `block_scaled` leaves are fp8 in a quantised checkpoint.
    """

    shape: tuple[int, ...]
    dtype: DiskDtype
    axes: tuple[str, ...]
    sources: tuple[Source, ...]
    initializer: Initializer = "normal"
    float32_island: bool = False
    block_scaled: bool = False

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{self.sources[0].name}: axes {self.axes} for shape {self.shape}")

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """Shape of the block scales that go with this leaf when it is fp8."""
        return block_grid(self.shape)


def block_grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Number of 128 x 128 blocks along the last two axes, leading axes kept."""
    return (*shape[:-2], *(-(-size // FP8_BLOCK) for size in shape[-2:]))


def is_spec(node: Any) -> bool:
    """For `is_leaf` arguments of tree functions."""
    return isinstance(node, ParameterSpec)


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Leaves by dotted path ("layers.3.attention.o_proj"), in tree order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
