"""What is trained on when: phases of growing length, learning rate and the presets that choose them."""

import dataclasses

from benchmarks.tiny.data import BatchSpec
from benchmarks.tiny.shape import Shape


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of training on batches of one kind.

    until: share of the whole run at which this phase ends at the latest; it ends sooner once the moving
    average of recall accuracy passes `enough`. sparse: attention sees what the indexer selects.
    """

    batch: BatchSpec
    until: float
    sparse: bool = False
    enough: float = 2.0


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model and its whole training.

    rate: peak learning rate; decay_from: share of the run at which it begins to fall.
    """

    shape: Shape
    phases: tuple[Phase, ...]
    rate: float
    weight_decay: float = 0.02
    decay_from: float = 0.5
    warmup_steps: int = 60


def _phase(length: int, rows: int, mix: tuple[float, float, float], until: float, **kwargs: object) -> Phase:
    return Phase(BatchSpec(rows, length, mix), until, **kwargs)


def learning_rate(preset: Preset, step: int, share: float) -> float:
    """Linear warm-up, flat, then linear to nearly zero from `decay_from` on; share: of the run, 0..1."""
    falling = min(1.0, (1 - share) / (1 - preset.decay_from))
    return preset.rate * min(1.0, (step + 1) / preset.warmup_steps) * max(falling, 0.002)


PRESETS = {
    "h200": Preset(
        shape=Shape(),
        phases=(
            _phase(256, 256, (0.4, 0.5, 0.1), 0.25, enough=0.97),
            _phase(512, 128, (0.4, 0.4, 0.2), 0.40, enough=0.98),
            _phase(1024, 64, (0.4, 0.4, 0.2), 0.55, enough=0.98),
            _phase(2048, 32, (0.4, 0.4, 0.2), 0.78),
            _phase(2048, 32, (0.4, 0.4, 0.2), 1.0, sparse=True),
        ),
        rate=3e-3,
    ),
    # Two laptop cores: a smaller model of the same kind, short conversations.
    "cpu": Preset(
        shape=Shape(
            hidden_size=96,
            num_layers=8,
            dense_width=192,
            expert_width=16,
            q_lora_rank=64,
            kv_lora_rank=64,
            qk_head_dim=32,
            v_head_dim=16,
            kda_head_dim=16,
            index_head_dim=16,
            index_topk=64,
            compute_dtype="float32",
            kda_chunk=16,
        ),
        phases=(
            _phase(128, 16, (0.4, 0.4, 0.2), 0.5, enough=0.95),
            _phase(256, 8, (0.4, 0.4, 0.2), 0.85),
            _phase(256, 8, (0.4, 0.4, 0.2), 1.0, sparse=True),
        ),
        rate=4e-3,
    ),
    # From the state of an "h200" run: served length and selection only, problems above all.
    "touch-up": Preset(
        shape=Shape(),
        phases=(_phase(1024, 64, (0.6, 0.2, 0.2), 1.0, sparse=True),),
        rate=1.5e-3,
        decay_from=0.3,
        warmup_steps=30,
    ),
}
