"""The collectives a sharded step needs, as no-ops when there is no mesh axis.

Layer code runs either on whole arrays (`axis` is None) or on one shard inside `jax.shard_map`.
Every cross-device exchange of the model goes through this file, so it can be read and counted.
"""

import jax
import jax.numpy as jnp


def all_reduce(x: jax.Array, axis: str | None) -> jax.Array:
    """Sum of the shards' partial results: after a row-parallel projection."""
    return x if axis is None else jax.lax.psum(x, axis)


def all_gather_last(x: jax.Array, axis: str | None) -> jax.Array:
    """Concatenates the shards along the last axis: vocabulary-sharded logits to whole rows."""
    return x if axis is None else jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)


def shard_start(size: int, axis: str | None) -> jax.Array | int:
    """First global index of this shard of an axis split into equal parts of `size`."""
    return 0 if axis is None else jax.lax.axis_index(axis) * size


def argmax_last(x: jax.Array, axis: str | None) -> jax.Array:
    """Index of the largest value over a sharded last axis, ties to the lowest: `[...]` int32."""
    best = jnp.argmax(x, axis=-1).astype(jnp.int32)
    if axis is None:
        return best
    value = jnp.max(x, axis=-1)
    index = best + shard_start(x.shape[-1], axis)
    largest = jax.lax.pmax(value, axis)
    return jax.lax.pmin(jnp.where(value == largest, index, jnp.iinfo(jnp.int32).max), axis)


def embedding_lookup(table: jax.Array, tokens: jax.Array, axis: str | None) -> jax.Array:
    """Rows of a table that is sharded over the vocabulary: `[...]` ids -> `[..., hidden]`.

    Ids outside the table give the nearest row's embedding; callers validate ids where they are concrete.
    """
    if axis is None:
        return table[jnp.clip(tokens, 0, table.shape[0] - 1)]
    local = tokens - shard_start(table.shape[0], axis)
    owned = (local >= 0) & (local < table.shape[0])
    rows = table[jnp.clip(local, 0, table.shape[0] - 1)]
    return jax.lax.psum(jnp.where(owned[..., None], rows, 0), axis)
