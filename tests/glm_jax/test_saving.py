"""Saving: byte identity per tensor, layouts kept, and nothing half written."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax import params, saving
from glm_jax.config import load_config
from glm_jax.loading import Model, load
from glm_jax.saving import save
from tests.tiny_checkpoints import random_tensors, raw_config, read_folder, write_folder

TOKENIZER_FILES = {
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"temperature": 0.5}',
    "preprocessor_config.json": "{}",
}


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """fp8, vision, two shards and text files: all that a released checkpoint has."""
    raw = raw_config(quantized=True, vision=True)
    folder = write_folder(tmp_path / "released", raw, random_tensors(raw), shards=2)
    for name, content in TOKENIZER_FILES.items():
        (folder / name).write_text(content)
    return folder


def random_model(**text: Any) -> Model:
    config = load_config(raw_config(**text))
    return Model(config, params.init(config, jax.random.key(0), "bfloat16"))


@pytest.mark.parametrize("shard_bytes", [saving.SHARD_BYTES, 60_000])
def test_load_then_save_is_byte_identical(released: Path, tmp_path: Path, shard_bytes: int) -> None:
    model = load(released, dtype=None)
    save(model, tmp_path / "out", shard_bytes=shard_bytes)
    assert read_folder(tmp_path / "out") == read_folder(released)
    assert load_config(tmp_path / "out") == load_config(released) == model.config
    for name, content in TOKENIZER_FILES.items():
        assert (tmp_path / "out" / name).read_text() == content
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["image_token_id"] == 90 and raw["vision_config"]["depth"] == 1
    assert (
        raw["quantization_config"]
        == json.loads((released / "config.json").read_text())["quantization_config"]
    )
    again = load(tmp_path / "out", dtype=None)
    for left, right in zip(jax.tree.leaves(model.params), jax.tree.leaves(again.params), strict=True):
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def test_shards_and_their_index(released: Path, tmp_path: Path) -> None:
    save(load(released, dtype=None), tmp_path / "out", shard_bytes=60_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = read_folder(tmp_path / "out")
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(len(data) for *_, data in tensors.values())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == sorted(set(index["weight_map"].values()))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 3
    largest = max(len(data) for *_, data in tensors.values())
    for file in files:
        held = [len(tensors[name][2]) for name, shard in index["weight_map"].items() if shard == file.name]
        assert sum(held) <= max(60_000, largest)


def test_a_flat_text_model_stays_one(tmp_path: Path) -> None:
    raw = raw_config()
    tensors = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in random_tensors(raw).items()
    }
    write_folder(tmp_path / "flat", raw["text_config"], tensors)
    save(load(tmp_path / "flat", dtype=None), tmp_path / "out")
    assert read_folder(tmp_path / "out") == read_folder(tmp_path / "flat")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["model_type"] == "glm5_next_text" and "text_config" not in written


def test_a_model_made_in_memory(tmp_path: Path) -> None:
    model = random_model()
    save(model, tmp_path / "out")
    assert {name: entry[:2][::-1] for name, entry in read_folder(tmp_path / "out").items()} == (
        params.checkpoint_tensors(model.config)
    )
    text = json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]
    assert text["layer_types"] == ["linear_attention", "deepseek_sparse_attention"] * 2
    assert text["mlp_layer_types"] == ["dense", "sparse", "dense", "sparse"]
    assert text["indexer_types"] == ["full", "full", "full", "shared"]
    assert load(tmp_path / "out").config == model.config


def test_saved_dtype_is_that_of_the_weights(released: Path, tmp_path: Path) -> None:
    save(load(released, dtype="float32"), tmp_path / "out")
    assert load_config(tmp_path / "out").dtype == "float32"
    kept = read_folder(tmp_path / "out")
    assert kept["lm_head.weight"][0] == "F32"
    assert kept["model.visual.downsample.bias"] == read_folder(released)["model.visual.downsample.bias"]


def test_edited_parameters_are_what_is_saved(released: Path, tmp_path: Path) -> None:
    model = load(released)
    edited = model.params.replace(norm=model.params.norm + 1)
    save(dataclasses.replace(model, params=edited), tmp_path / "out")
    np.testing.assert_array_equal(load(tmp_path / "out").params.norm, edited.norm)


def test_existing_folders_are_not_overwritten_unasked(tmp_path: Path) -> None:
    model = random_model()
    (tmp_path / "empty").mkdir()
    save(model, tmp_path / "empty")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save(model, tmp_path / "empty")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="no checkpoint folder"):
        save(model, tmp_path / "other", overwrite=True)
    assert (tmp_path / "other" / "thesis.tex").exists()


def test_a_model_can_be_saved_over_its_own_source(released: Path) -> None:
    before = read_folder(released)
    model = load(released, dtype=None)
    save(model, released, overwrite=True)
    assert read_folder(released) == before
    assert [path.name for path in released.parent.iterdir()] == ["released"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool) -> None:
    model = random_model()
    target = tmp_path / "place" / "out"
    if overwrite:
        save(model, target)
    before = read_folder(target) if overwrite else {}

    def full_disk(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(saving, "write_text_files", full_disk)
    with pytest.raises(OSError, match="no space left"):
        save(model, target, overwrite=overwrite)
    assert [path.name for path in target.parent.iterdir()] == (["out"] if overwrite else [])
    assert (read_folder(target) if overwrite else {}) == before


def test_parameters_that_do_not_fit_the_configuration(tmp_path: Path) -> None:
    model = random_model()
    wrong = model.params.replace(norm=jnp.zeros(3))
    with pytest.raises(ValueError, match=r"norm: shape \(3,\), the configuration says \(40,\)"):
        save(dataclasses.replace(model, params=wrong), tmp_path / "out")
    with pytest.raises(ValueError, match=r"do not fit.*mtp\.enorm"):
        save(dataclasses.replace(model, params=model.params.replace(mtp=None)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_gone(released: Path, tmp_path: Path) -> None:
    model = dataclasses.replace(load(released), source=tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="gone"):
        save(model, tmp_path / "out")
