"""What the engine may use: the server's flags in snake case, plus the cache's geometry."""

import dataclasses
from collections.abc import Mapping
from typing import Any

MOST_DRAFTS = 7
KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Checked when made: ValueError naming the field, its value and the bound.

    Attributes:
        max_model_len: most tokens of a request, prompt and answer together; None: what the model allows,
            on a CPU at most 4096.
        max_num_seqs: most answers generated at once.
        max_num_batched_tokens: most tokens one engine step runs, prefill and decode together.
        gpu_memory_utilization: share of a device's memory that weights and cache may fill.
        num_gpu_blocks_override: number of cache blocks, instead of what the memory has room for.
        num_state_slots_override: number of state slots, instead of a share of the memory; with prefix caching
            at least 3 for each of max_num_seqs (the running state and two rolling snapshots).
        block_size: tokens of a cache block, a multiple of the model's index_kpool.
        snapshot_spacing: tokens between regular snapshots of a prompt's states; a multiple of block_size.
        enable_prefix_caching: reuse what earlier requests computed for the same beginning.
        async_scheduling: dispatch a step before the last one's tokens are read.
        speculative_config: {"method": "mtp", "num_speculative_tokens": 0 to 7}, or None for no drafts.
        kv_cache_dtype: of the latents: "auto" (the compute dtype), "bfloat16" or "fp8" (e4m3, one scale
            for 128 channels).
        max_num_queued_reqs: most requests waiting; one more is refused. None: no limit.
        trace_requests: keep the events of every request's life as `request.trace`, for debugging.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    num_state_slots_override: int | None = None
    block_size: int = 64
    snapshot_spacing: int = 2048
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    speculative_config: Mapping[str, Any] | None = None
    kv_cache_dtype: str = "auto"
    max_num_queued_reqs: int | None = None
    trace_requests: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "snapshot_spacing"):
            _at_least(name, getattr(self, name), 1)
        for name in (
            "max_model_len", "num_gpu_blocks_override", "num_state_slots_override", "max_num_queued_reqs"
        ):  # fmt: skip
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}"
            )
        if self.snapshot_spacing % self.block_size:
            raise ValueError(
                f"snapshot_spacing must be a multiple of block_size {self.block_size}, "
                f"got {self.snapshot_spacing}"
            )
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype must be one of {KV_CACHE_DTYPES}, got {self.kv_cache_dtype!r}")
        self._check_speculation()

    def _check_speculation(self) -> None:
        given = self.speculative_config
        if given is None:
            return
        if not isinstance(given, Mapping) or given.get("method", "mtp") != "mtp":
            raise ValueError(f'speculative_config must have "method": "mtp", got {given!r}')
        unknown = set(given) - {"method", "num_speculative_tokens"}
        if unknown:
            raise ValueError(f"speculative_config has unknown fields {sorted(unknown)}")
        count = given.get("num_speculative_tokens")
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_DRAFTS:
            raise ValueError(
                f"speculative_config: num_speculative_tokens must be 0 to {MOST_DRAFTS}, got {count!r}"
            )

    @property
    def num_drafts(self) -> int:
        """Speculative tokens a step."""
        return (
            0 if self.speculative_config is None else int(self.speculative_config["num_speculative_tokens"])
        )

    @property
    def slots_per_seq(self) -> int:
        """State slots a running answer owns: its state, and two rolling snapshots."""
        return 3 if self.enable_prefix_caching else 1


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
