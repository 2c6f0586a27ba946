"""How many cache blocks there is room for."""

import dataclasses
import math

import jax

from glm_jax import cache as caches
from glm_jax.config import Config
from glm_jax.params import Params
from serving.engine_config import EngineConfig

# Without a device memory limit (CPU) the cache takes at most this much.
HOST_CACHE_BYTES = 2 * 2**30


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    max_model_len: int
    num_blocks: int
    block_bytes: int
    fixed_bytes: int  # what the cache holds per running answer, for all of them

    @property
    def cache_bytes(self) -> int:
        return self.fixed_bytes + self.num_blocks * self.block_bytes


def plan_memory(params: Params, config: Config, engine: EngineConfig) -> MemoryPlan:
    """Blocks for `max_num_seqs` answers of full length, or as many as memory allows.

    Raises ValueError if a limit exceeds the model's, or one answer of full length does not fit.
    """
    max_model_len = engine.max_model_len or config.max_position_embeddings
    if max_model_len > config.max_position_embeddings:
        raise ValueError(
            f"max_model_len must be at most the model's max_position_embeddings "
            f"{config.max_position_embeddings}, got {max_model_len}"
        )
    fixed, block = _bytes(params, config, engine, 0), _bytes(params, config, engine, 1)
    block -= fixed
    per_answer = math.ceil(max_model_len / engine.block_size)
    if engine.num_gpu_blocks_override is not None:
        blocks, source = engine.num_gpu_blocks_override, "num_gpu_blocks_override"
    else:
        room = _free_bytes(params, engine.gpu_memory_utilization) - fixed
        blocks, source = min(engine.max_num_seqs * per_answer, max(room // block, 0)), "the memory available"
    if blocks < per_answer:
        raise ValueError(
            f"{source} gives {blocks} cache blocks of {engine.block_size} tokens, but one request of "
            f"max_model_len {max_model_len} needs {per_answer}: lower max_model_len"
        )
    return MemoryPlan(max_model_len, blocks, block, fixed)


def geometry(engine: EngineConfig, num_blocks: int) -> dict[str, int]:
    """The cache's sizes, as `glm_jax.cache.create` takes them."""
    return {
        "num_blocks": num_blocks,
        "block_size": engine.block_size,
        "num_state_slots": engine.max_num_seqs,
        "num_request_slots": engine.max_num_seqs,
    }


def _bytes(params: Params, config: Config, engine: EngineConfig, num_blocks: int) -> int:
    shapes = caches.shapes(config, **geometry(engine, num_blocks), dtype=params.embed_tokens.dtype)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def _free_bytes(params: Params, utilization: float) -> int:
    """Bytes the cache may take on the device with the least room."""
    free = []
    for device in params.embed_tokens.devices():
        stats = device.memory_stats()
        if stats and "bytes_limit" in stats:
            free.append(int(stats["bytes_limit"] * utilization) - stats["bytes_in_use"])
    return min(free, default=HOST_CACHE_BYTES)
