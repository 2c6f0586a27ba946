"""Rows of a rectangular batch: checks on concrete input, and moving padding to the right."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from glm_jax.config import Config


def is_concrete(x: Any) -> bool:
    """False under a trace, where value checks are skipped."""
    return not isinstance(x, jax.core.Tracer)


def check_tokens(tokens: jax.Array, config: Config) -> None:
    """ValueError unless `tokens` is a non-empty `[batch, time]` array of ids inside the vocabulary."""
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"tokens must have shape [batch, time] with both at least 1, got {tokens.shape}")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers, got {tokens.dtype}")
    if tokens.shape[1] > config.max_position_embeddings:
        raise ValueError(
            f"a row of {tokens.shape[1]} tokens is longer than max_position_embeddings "
            f"{config.max_position_embeddings}"
        )
    if is_concrete(tokens):
        low, high = int(np.min(tokens)), int(np.max(tokens))
        if low < 0 or high >= config.vocab_size:
            worst = low if low < 0 else high
            raise ValueError(f"token id {worst} is outside the vocabulary [0, {config.vocab_size})")


def check_mask(mask: jax.Array | None, tokens: jax.Array) -> None:
    """ValueError unless `mask` is None or one unbroken run of True in every row."""
    if mask is None:
        return
    if mask.shape != tokens.shape:
        raise ValueError(f"mask has shape {mask.shape}, tokens have {tokens.shape}")
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask must be bool, got {mask.dtype}")
    if not is_concrete(mask):
        return
    concrete = np.asarray(mask)
    for row, real in enumerate(concrete):
        where = np.flatnonzero(real)
        if where.size == 0:
            raise ValueError(f"row {row} of the mask is all padding")
        if where[-1] - where[0] + 1 != where.size:
            raise ValueError(
                f"row {row} of the mask has a hole between positions {where[0]} and {where[-1]}: "
                "only left or right padding is supported"
            )


@struct.dataclass
class AlignedRows:
    """A batch whose real tokens start at position 0 of every row."""

    tokens: jax.Array  # [batch, time]
    lengths: jax.Array  # [batch] int32
    order: jax.Array | None  # [batch, time] where each aligned position came from; None when nothing moved

    def apply(self, x: jax.Array) -> jax.Array:
        """Aligns another `[batch, time, ...]` array."""
        return x if self.order is None else _take_time(x, self.order)

    def restore(self, x: jax.Array) -> jax.Array:
        """The inverse of `apply`."""
        return x if self.order is None else _take_time(x, jnp.argsort(self.order, axis=1))


def _take_time(x: jax.Array, order: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)


def align_left(tokens: jax.Array, mask: jax.Array | None) -> AlignedRows:
    """Moves every row's padding to the right; `tokens [batch, time]`, `mask [batch, time]` bool or None."""
    batch, time = tokens.shape
    if mask is None:
        return AlignedRows(tokens, jnp.full((batch,), time, jnp.int32), None)
    order = jnp.argsort(~mask, axis=1, stable=True)
    lengths = jnp.sum(mask, axis=1, dtype=jnp.int32)
    return AlignedRows(jnp.take_along_axis(tokens, order, axis=1), lengths, order)
