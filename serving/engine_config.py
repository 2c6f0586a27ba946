"""What the engine may use: the server's flags in snake case, plus the cache's block size and chunk
spacing."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Checked when made: ValueError naming the field, its value and the bound.

    Attributes:
        max_model_len: most tokens of a request, prompt and answer together; None: what the model allows.
        max_num_seqs: most answers generated at once.
        max_num_batched_tokens: most tokens one engine step runs, prefill and decode together.
        gpu_memory_utilization: share of a device's memory that weights and cache may fill.
        num_gpu_blocks_override: number of cache blocks, instead of what the memory has room for.
        block_size: tokens of a cache block, a multiple of the model's index_kpool.
        snapshot_spacing: prefill chunks end at its multiples, so that a state exists there; a multiple of
            block_size.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    block_size: int = 64
    snapshot_spacing: int = 2048

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "snapshot_spacing"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_model_len", "num_gpu_blocks_override"):
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


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
