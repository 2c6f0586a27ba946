"""Routing as tiles: the choices (token, slot) of every expert side by side, padded to whole tiles.

Counting instead of sorting: a choice's place is its expert's start, plus the earlier chunks' choices of that
expert, plus the earlier ones in its own chunk. All of it is comparing and summing, which a GPU does in a few
small launches; an argsort of the same choices costs more than the expert products at small batches.
"""

import dataclasses

import jax
import jax.numpy as jnp

_CHUNK = 256  # comparing all pairs inside a chunk costs choices * _CHUNK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertTiles:
    """sources: [tiles * tile] int32, the choice in a row, `choices` where the row is padding.
    destinations: [choices] int32, the row of a choice, `tiles * tile` for one without an expert.
    experts: [tiles] int32, the expert of a tile, -1 for an empty tile; empty tiles come last.
    """

    sources: jax.Array
    destinations: jax.Array
    experts: jax.Array


def expert_tiles(expert_ids: jax.Array, experts: int, tile: int) -> ExpertTiles:
    """Lays out expert_ids [choices] int32 (-1: none) in tiles of `tile` rows, any routing at static shapes.

    Within an expert the choices keep their order: a choice's row in its tile depends on earlier ones only.
    """
    choices = expert_ids.shape[0]
    tiles = (choices + min(experts, choices) * (tile - 1)) // tile
    chunk = min(_CHUNK, choices)
    chunked = jnp.pad(expert_ids, (0, -choices % chunk), constant_values=-1).reshape(-1, chunk)

    def count(matches: jax.Array, axis: int) -> jax.Array:
        return matches.sum(axis=axis, dtype=jnp.int32)

    earlier = jnp.arange(chunk)[:, None] > jnp.arange(chunk)
    rank = count((chunked[:, :, None] == chunked[:, None, :]) & earlier, -1)
    histogram = count(chunked[:, :, None] == jnp.arange(experts, dtype=expert_ids.dtype), 1)
    running = jnp.cumsum(histogram, axis=0, dtype=jnp.int32)
    padded = (running[-1] + tile - 1) // tile * tile
    ends = jnp.cumsum(padded, dtype=jnp.int32)

    safe = jnp.maximum(chunked, 0)
    before = jnp.take_along_axis(running - histogram, safe, axis=1)
    destinations = jnp.where(chunked >= 0, (ends - padded)[safe] + before + rank, tiles * tile)
    destinations = destinations.reshape(-1)[:choices]
    sources = jnp.full(tiles * tile, choices, jnp.int32)
    sources = sources.at[destinations].set(jnp.arange(choices, dtype=jnp.int32), mode="drop")
    starts = jnp.arange(tiles, dtype=jnp.int32)[:, None] * tile
    owner = count(ends <= starts, -1)
    return ExpertTiles(sources, destinations, jnp.where(owner < experts, owner, -1))
