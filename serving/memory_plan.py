"""From a device's memory to cache blocks and state slots."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from glm_jax import cache as caches
from glm_jax.config import Config
from glm_jax.params import Params
from serving.engine_config import EngineConfig

# A device without a memory limit is a CPU, for tests and study: its cache takes at most this much, and its
# default context is short, because the reference operations read a request's whole block table at every step.
CPU_CACHE_BYTES = 2 * 2**30
CPU_CONTEXT = 4096
# Beyond what running answers own: one cached snapshot for this many tokens of cache blocks, and one for each
# of max_num_seqs at least, since a prompt of any length needs one to be hit. Prompts leave a regular snapshot
# every 2,048 tokens and two or three special ones each.
TOKENS_PER_SNAPSHOT = 1024


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes are those of one device."""

    max_model_len: int
    num_blocks: int
    num_state_slots: int
    weight_bytes: int
    block_bytes: int
    state_bytes: int  # a slot
    fixed_bytes: int  # rings, records and tables of running answers

    @property
    def cache_bytes(self) -> int:
        return self.fixed_bytes + self.num_blocks * self.block_bytes + self.num_state_slots * self.state_bytes

    def table(self, block_size: int) -> str:
        """For people, printed at start."""
        rows = [
            ("weights", "", self.weight_bytes),
            ("cache blocks", f"{self.num_blocks} x {block_size} tokens", self.num_blocks * self.block_bytes),
            ("state slots", f"{self.num_state_slots}", self.num_state_slots * self.state_bytes),
            ("running requests", "rings, records, tables", self.fixed_bytes),
            ("together", f"context {self.max_model_len}", self.weight_bytes + self.cache_bytes),
        ]
        return "\n".join(f"{name:<18}{what:<28}{size / 2**20:>12.1f} MiB" for name, what, size in rows)


def plan_memory(params: Params, config: Config, engine: EngineConfig) -> MemoryPlan:
    """Splits what weights leave free between blocks and state slots.

    With prefix caching on a device that states its memory: all of it, since what running answers do not need
    keeps prefixes. Else enough for `max_num_seqs` answers of full length, or as much as fits.

    Raises ValueError if a limit exceeds the model's, if the model cannot do what is asked, or if one answer
    of full length does not fit.
    """
    limit = _free_bytes(params, engine.gpu_memory_utilization)
    longest = config.max_position_embeddings
    max_model_len = engine.max_model_len or (min(longest, CPU_CONTEXT) if limit is None else longest)
    if max_model_len > longest:
        raise ValueError(
            f"max_model_len must be at most the model's max_position_embeddings {longest}, "
            f"got {max_model_len}"
        )
    if engine.num_drafts and not config.num_mtp_layers:
        raise ValueError(
            f"speculative_config asks for {engine.num_drafts} drafts, but this checkpoint has no MTP layer "
            "(num_nextn_predict_layers is 0)"
        )
    fixed = _bytes(params, config, engine, 0, 0)
    block = _bytes(params, config, engine, 1, 0) - fixed
    state = _bytes(params, config, engine, 0, 1) - fixed
    owned = engine.slots_per_seq * engine.max_num_seqs
    per_answer = math.ceil(max_model_len / engine.block_size)
    wanted = engine.max_num_seqs * per_answer

    def snapshots(blocks: int) -> int:
        cached = math.ceil(blocks * engine.block_size / TOKENS_PER_SNAPSHOT)
        return max(cached, engine.max_num_seqs) if engine.enable_prefix_caching else 0

    room = (CPU_CACHE_BYTES if limit is None else limit) - fixed - owned * state
    if engine.num_gpu_blocks_override is not None:
        blocks, source = engine.num_gpu_blocks_override, "num_gpu_blocks_override"
    else:
        # each block brings its share of a cached snapshot, rounded up, and there is a least number of them
        one = state if engine.enable_prefix_caching else 0
        share = one * engine.block_size / TOKENS_PER_SNAPSHOT
        fits = min(int((room - one) / (block + share)), int((room - snapshots(0) * state) / block))
        keeps_prefixes = engine.enable_prefix_caching and limit is not None
        blocks, source = max(fits if keeps_prefixes else min(wanted, fits), 0), "the memory available"
    if blocks < per_answer:
        raise ValueError(
            f"{source} gives {blocks} cache blocks of {engine.block_size} tokens, but one request of "
            f"max_model_len {max_model_len} needs {per_answer}: lower max_model_len"
        )
    slots = engine.num_state_slots_override or owned + snapshots(blocks)
    if slots < owned:
        raise ValueError(
            f"num_state_slots_override must be at least {owned} ({engine.slots_per_seq} for each of "
            f"max_num_seqs {engine.max_num_seqs}), got {slots}"
        )
    weights = sum(_shard_bytes(leaf) for leaf in jax.tree.leaves(params))
    return MemoryPlan(max_model_len, blocks, slots, weights, block, state, fixed)


def geometry(params: Params, engine: EngineConfig, num_blocks: int, num_state_slots: int) -> dict[str, Any]:
    """The cache's sizes and dtypes, as `glm_jax.cache.create` takes them."""
    compute = params.embed_tokens.dtype
    latent = {"auto": compute, "bfloat16": jnp.bfloat16}.get(engine.kv_cache_dtype, caches.FLOAT8)
    return {
        "num_blocks": num_blocks,
        "block_size": engine.block_size,
        "num_state_slots": num_state_slots,
        "num_request_slots": engine.max_num_seqs,
        "drafts": engine.num_drafts,
        "dtype": compute,
        "latent_dtype": latent,
    }


def _bytes(params: Params, config: Config, engine: EngineConfig, blocks: int, slots: int) -> int:
    shapes = caches.shapes(config, **geometry(params, engine, blocks, slots))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def _shard_bytes(leaf: jax.Array) -> int:
    shape = leaf.sharding.shard_shape(leaf.shape) if hasattr(leaf, "sharding") else leaf.shape
    return math.prod(shape) * leaf.dtype.itemsize


def _free_bytes(params: Params, utilization: float) -> int | None:
    """Bytes the cache may take on the device with the least room; None if no device states a limit."""
    free = []
    for device in params.embed_tokens.devices():
        stats = device.memory_stats()
        if stats and "bytes_limit" in stats:
            free.append(int(stats["bytes_limit"] * utilization) - stats["bytes_in_use"])
    return min(free, default=None)
