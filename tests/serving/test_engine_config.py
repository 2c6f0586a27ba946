"""Bad limits are refused with the field, its value and the bound."""

import re

import pytest

from serving import memory_plan
from serving.engine import Engine
from serving.engine_config import EngineConfig
from tests.serving.fake_device import FakeDevice
from tests.serving.tiny_text import weightless_model


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"max_model_len": 0}, "max_model_len must be at least 1, got 0"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override must be at least 1, got 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be above 0 and at most 1, got 1.5"),
        ({"snapshot_spacing": 100}, "snapshot_spacing must be a multiple of block_size 64, got 100"),
        (
            {"max_num_seqs": 8, "max_num_batched_tokens": 7},
            "max_num_batched_tokens must be at least max_num_seqs 8",
        ),
        ({"max_model_len": 513}, "at most the model's max_position_embeddings 512, got 513"),
        ({"block_size": 6, "snapshot_spacing": 6}, "block_size 6 must be a multiple of index_kpool 4"),
        (
            {"num_gpu_blocks_override": 7},
            "gives 7 cache blocks of 64 tokens, but one request of max_model_len 512 needs 8",
        ),
    ],
)
def test_refusals(limits: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Engine(weightless_model(), EngineConfig(**limits), runner=FakeDevice(64))


def test_without_an_override_every_row_can_be_full_length() -> None:
    engine = Engine(weightless_model(), EngineConfig(max_num_seqs=3), runner=FakeDevice(64))
    assert engine.stats()["total_blocks"] == 3 * 8
    plan = engine.plan
    # three a running answer, one cached for 1,024 tokens of blocks but no fewer than one an answer
    assert plan.num_state_slots == 3 * 3 + 3
    assert plan.cache_bytes == plan.fixed_bytes + 24 * plan.block_bytes + 12 * plan.state_bytes


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("mebibytes", [1, 3, 50])
def test_a_device_that_states_its_memory(
    monkeypatch: pytest.MonkeyPatch, caching: bool, mebibytes: int
) -> None:
    """With prefix caching the cache takes all there is, not only what running answers can need."""
    monkeypatch.setattr(memory_plan, "_free_bytes", lambda *_: mebibytes * 2**20)
    limits = EngineConfig(max_num_seqs=3, max_model_len=128, enable_prefix_caching=caching)
    model = weightless_model()
    plan = memory_plan.plan_memory(model.params, model.config, limits)
    assert plan.cache_bytes <= mebibytes * 2**20
    if caching:
        assert plan.num_state_slots == 9 + max(3, -(-plan.num_blocks // 16))
        # no block with the snapshot it may bring is left, nor the one that rounding may have cost
        assert mebibytes * 2**20 - plan.cache_bytes < plan.block_bytes + 2 * plan.state_bytes
    else:
        assert (plan.num_blocks, plan.num_state_slots) == (3 * 2, 3)


def test_memory_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "_free_bytes", lambda *_: 1000)
    with pytest.raises(ValueError, match="the memory available gives 0 cache blocks of 64 tokens"):
        Engine(weightless_model(), EngineConfig(), runner=FakeDevice(64))
