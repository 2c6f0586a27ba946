"""A checkpoint in the released fp8 layout computes what its dequantised twin does, bit for bit in float32."""

from pathlib import Path

import numpy as np
import pytest

import glm_jax
from glm_jax import mtp
from glm_jax.quantization import BlockScaled
from tests.oracle.architectures import configuration
from tests.oracle.checkpoint import quantized_twins, random_checkpoint, write_folder

# Wider than a block of 128 and no multiple of it, so that both axes have a ragged last block.
SIZES = {
    "hidden_size": 160,
    "intermediate_size": 264,
    "moe_intermediate_size": 136,
    "q_lora_rank": 144,
    "n_routed_experts": 4,
}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[glm_jax.Model, glm_jax.Model]:
    config = configuration("pool4", 0, **SIZES)
    fp8, dequantized = quantized_twins(random_checkpoint(config, 0), 0)
    folder: Path = tmp_path_factory.mktemp("twins")
    return (
        glm_jax.load(write_folder(folder / "fp8", config, fp8), dtype="float32"),
        glm_jax.load(write_folder(folder / "dequantized", config, dequantized), dtype="float32"),
    )


def test_fp8_and_dequantised_logits_are_equal(twins: tuple[glm_jax.Model, glm_jax.Model]) -> None:
    fp8, dequantized = twins
    attention, mlp = fp8.params.layers[1].attention, fp8.params.layers[1].mlp
    assert isinstance(attention.q_b_proj, BlockScaled) and isinstance(mlp.gate_up, BlockScaled)
    assert not isinstance(dequantized.params.layers[1].mlp.gate_up, BlockScaled)
    tokens = np.random.default_rng(0).integers(0, fp8.config.vocab_size, (2, 40), np.int32)
    ours, twin = (glm_jax.forward(m.params, m.config, tokens, implementation="xla") for m in twins)
    assert np.asarray(ours).std() > 1
    np.testing.assert_array_equal(ours, twin)
    hidden = glm_jax.model_states(fp8.params, fp8.config, tokens).hidden
    ours, twin = (mtp.forward(m.params, m.config, tokens, hidden, steps=2) for m in twins)
    np.testing.assert_array_equal(ours, twin)
