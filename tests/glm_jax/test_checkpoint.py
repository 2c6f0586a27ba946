"""Orbax checkpoints on one device; resharding is in two_device_checks.py."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax import checkpoint, params
from glm_jax.config import load_config
from glm_jax.loading import Model, load
from glm_jax.quantize import quantized
from glm_jax.safetensors_file import CheckpointError
from tests.tiny_checkpoints import raw_config


@pytest.fixture(scope="module")
def model() -> Model:
    config = load_config(raw_config())
    return Model(config, params.init(config, jax.random.key(0), "bfloat16"))


@pytest.fixture(scope="module")
def saved(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orbax") / "model"
    checkpoint.save(model, folder)
    return folder


def assert_same(left: params.Params, right: params.Params) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_round_trip(model: Model, saved: Path) -> None:
    config, restored = checkpoint.restore(saved)
    assert config == model.config
    assert_same(restored, model.params)
    loaded = load(saved, dtype=None)
    assert loaded.source == saved
    assert_same(loaded.params, model.params)


def test_fp8_round_trip(model: Model, tmp_path: Path) -> None:
    twin = quantized(model)
    checkpoint.save(twin, tmp_path / "fp8")
    config, restored = checkpoint.restore(tmp_path / "fp8", dtype="float32")
    assert config.quantization == 128
    assert restored.layers[1].mlp.down.values.dtype == jnp.float8_e4m3fn
    assert restored.norm.dtype == jnp.float32
    assert_same(checkpoint.restore(tmp_path / "fp8")[1], twin.params)


def test_dtypes_and_islands(saved: Path) -> None:
    narrow = load(saved, dtype="float16").params
    assert narrow.norm.dtype == jnp.float16
    assert narrow.layers[0].attention.dt_bias.dtype == jnp.float32


def test_existing_folders_stay(model: Model, saved: Path) -> None:
    with pytest.raises(FileExistsError, match="overwrite=True"):
        checkpoint.save(model, saved)


def test_configuration_and_arrays_that_disagree(saved: Path, tmp_path: Path) -> None:
    other = raw_config(kv_lora_rank=16, indexer_types=["full"] * 4, num_nextn_predict_layers=0)
    (tmp_path / "params").symlink_to(saved / "params")
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    for line in (
        "layers.1.attention.k_b: shape [2, 12, 24], expected [2, 12, 16]",
        "layers.3.attention.indexer.wk: missing, expected [8, 40]",
        "mtp.enorm: unexpected",
    ):
        assert line in str(error.value)


def test_parameters_of_another_configuration_are_not_saved(model: Model, tmp_path: Path) -> None:
    wrong = dataclasses.replace(model, params=model.params.replace(mtp=None))
    with pytest.raises(ValueError, match="do not fit"):
        checkpoint.save(wrong, tmp_path / "out")
    assert not (tmp_path / "out").exists()
