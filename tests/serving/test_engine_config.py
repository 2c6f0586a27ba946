"""Bad limits are refused with the field, its value and the bound."""

import re

import pytest

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
    assert plan.num_state_slots == 3 * 3 + 2  # three a running answer, one cached for 1,024 tokens of blocks
    assert plan.cache_bytes == plan.fixed_bytes + 24 * plan.block_bytes + 11 * plan.state_bytes
