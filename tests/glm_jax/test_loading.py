"""Loading: what each leaf holds, dtypes, layouts on disk, and every kind of broken checkpoint."""

import json
import logging
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import constants

from glm_jax import locating, params
from glm_jax.config import ConfigError, load_config
from glm_jax.loading import load
from glm_jax.quantization import BlockScaled
from glm_jax.safetensors_file import CheckpointError
from tests.tiny_checkpoints import dequantized_tensors, random_tensors, raw_config, write_folder

TEXT = "model.language_model."


def leaves_of(model: Any) -> dict[str, Any]:
    return params.named_leaves(model.params, lambda node: isinstance(node, BlockScaled))


def same(left: Any, right: Any) -> bool:
    """Equal in structure, dtype and every bit."""
    a, b = jax.tree.leaves(left), jax.tree.leaves(right)
    return jax.tree.structure(left) == jax.tree.structure(right) and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(a, b, strict=True)
    )


@pytest.fixture(scope="module")
def disk() -> dict[str, np.ndarray]:
    return random_tensors(raw_config())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, disk: dict[str, np.ndarray]) -> Path:
    return write_folder(tmp_path_factory.mktemp("plain") / "model", raw_config(), disk, shards=3)


def test_every_leaf_holds_its_tensors(folder: Path, disk: dict[str, np.ndarray]) -> None:
    """Each kind of leaf spelled out by hand, from the names on disk."""
    tree = load(folder, dtype=None).params

    def at(name: str) -> np.ndarray:
        return disk[f"{TEXT}layers.{name}"]

    def check(leaf: jax.Array, expected: np.ndarray) -> None:
        assert leaf.dtype == expected.dtype and leaf.shape == expected.shape
        np.testing.assert_array_equal(np.asarray(leaf), expected)

    check(tree.embed_tokens, disk[f"{TEXT}embed_tokens.weight"])
    check(tree.lm_head, disk["lm_head.weight"])
    check(tree.norm, disk[f"{TEXT}norm.weight"])
    kda, mla, mtp = tree.layers[0], tree.layers[1], tree.mtp
    check(kda.attention_hc.fn, at("0.hc_attn_fn"))
    check(kda.mlp_hc.scale, at("0.hc_ffn_scale"))
    for position, part in enumerate("qkv"):
        check(kda.attention.qkv_proj[position], at(f"0.self_attn.{part}_proj.weight"))
        check(kda.attention.conv[position], at(f"0.self_attn.{part}_conv1d.weight")[:, 0])
    check(kda.attention.fg_a[0], at("0.self_attn.f_a_proj.weight"))
    check(kda.attention.fg_a[1], at("0.self_attn.g_a_proj.weight"))
    check(kda.attention.A_log, at("0.self_attn.A_log"))
    check(kda.attention.o_proj, at("0.self_attn.o_proj.weight"))
    check(kda.mlp.gate_up[1], at("0.mlp.up_proj.weight"))
    check(kda.mlp.down, at("0.mlp.down_proj.weight"))
    fused = at("1.self_attn.kv_b_proj.weight")  # 2 heads of 12 key and 8 value channels
    check(mla.attention.k_b, np.stack([fused[0:12], fused[20:32]]))
    check(mla.attention.v_b, np.stack([fused[12:20], fused[32:40]]))
    check(mla.attention.o_bias, at("1.self_attn.o_proj.bias"))
    check(mla.attention.kv_a_proj, at("1.self_attn.kv_a_proj_with_mqa.weight"))
    check(mla.attention.indexer.ape, at("1.self_attn.indexer.index_kpool_compress_ape"))
    check(mla.attention.indexer.k_norm_bias, at("1.self_attn.indexer.k_norm.bias"))
    assert tree.layers[3].attention.indexer is None
    for expert in range(4):
        check(mla.mlp.gate_up[expert, 0], at(f"1.mlp.experts.{expert}.gate_proj.weight"))
        check(mla.mlp.gate_up[expert, 1], at(f"1.mlp.experts.{expert}.up_proj.weight"))
        check(mla.mlp.down[expert], at(f"1.mlp.experts.{expert}.down_proj.weight"))
    check(mla.mlp.shared.down, at("1.mlp.shared_experts.down_proj.weight"))
    check(mla.mlp.router_bias, at("1.mlp.gate.e_score_correction_bias"))
    check(mtp.eh_proj, at("4.eh_proj.weight"))
    check(mtp.norm, at("4.shared_head.norm.weight"))
    check(mtp.attention.indexer.gate, at("4.self_attn.indexer.index_kpool_compress_gate"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_and_float32_islands(folder: Path, dtype: str) -> None:
    specs = params.named_leaves(params.abstract(load(folder).config), params.is_spec)
    for path, leaf in leaves_of(load(folder, dtype=dtype)).items():
        assert leaf.dtype == (jnp.float32 if specs[path].float32_island else jnp.dtype(dtype)), path


def test_islands_stored_narrow_are_widened(tmp_path: Path, disk: dict[str, np.ndarray]) -> None:
    narrow = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in disk.items()}
    write_folder(tmp_path / "m", raw_config(), narrow)
    leaf = load(tmp_path / "m").params.layers[0].attention.A_log
    assert leaf.dtype == jnp.float32
    np.testing.assert_array_equal(leaf, narrow[f"{TEXT}layers.0.self_attn.A_log"].astype(np.float32))
    assert load(tmp_path / "m", dtype=None).params.layers[0].attention.A_log.dtype == jnp.bfloat16


@pytest.mark.parametrize("stored", [np.float16, np.float32])
def test_other_float_dtypes_on_disk(tmp_path: Path, disk: dict[str, np.ndarray], stored: Any) -> None:
    write_folder(tmp_path / "m", raw_config(), {name: tensor.astype(stored) for name, tensor in disk.items()})
    assert load(tmp_path / "m").params.embed_tokens.dtype == jnp.bfloat16
    assert load(tmp_path / "m", dtype=None).params.embed_tokens.dtype == stored


def test_unknown_dtypes_and_float64_without_x64(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype='int8'.*bfloat16"):
        load(folder, dtype="int8")
    with pytest.raises(ValueError, match="jax_enable_x64"):
        load(folder, dtype="float64")


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_text_only_layouts(tmp_path: Path, folder: Path, disk: dict[str, np.ndarray], prefix: str) -> None:
    """Flat configuration, and the tensor names of a text model on its own."""
    raw = raw_config()
    flat = {**raw["text_config"]}
    renamed = {name.replace(TEXT, prefix): tensor for name, tensor in disk.items()}
    write_folder(tmp_path / "m", flat, renamed)
    assert same(load(tmp_path / "m").params, load(folder).params)


def test_vision_is_skipped_and_said_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = raw_config(vision=True)
    tensors = random_tensors(raw)
    vision = [name for name in tensors if name.startswith("model.visual.")]
    write_folder(tmp_path / "m", raw, tensors)
    with caplog.at_level(logging.WARNING, logger="glm_jax"):
        load(tmp_path / "m")
    (record,) = caplog.records
    assert f"{len(vision)} tensors of the vision tower" in record.getMessage()
    del tensors[vision[0]]
    write_folder(tmp_path / "partial", raw, tensors)
    with pytest.raises(CheckpointError, match=f"{vision[0]}: missing"):
        load(tmp_path / "partial")


# fp8


@pytest.fixture(scope="module")
def fp8() -> dict[str, np.ndarray]:
    return random_tensors(raw_config(quantized=True))


def test_fp8_stays_fp8_for_every_dtype(tmp_path: Path, fp8: dict[str, np.ndarray]) -> None:
    write_folder(tmp_path / "m", raw_config(quantized=True), fp8)
    for dtype in ("bfloat16", "float32", None):
        model = load(tmp_path / "m", dtype=dtype)
        assert model.config.quantization == 128
        experts = model.params.layers[1].mlp.gate_up
        assert isinstance(experts, BlockScaled)
        assert experts.values.dtype == jnp.float8_e4m3fn and experts.scales.dtype == jnp.float32
        name = f"{TEXT}layers.1.mlp.experts.2.up_proj.weight"
        assert np.asarray(experts.values[2, 1]).tobytes() == fp8[name].tobytes()
        np.testing.assert_array_equal(experts.scales[2, 1], fp8[f"{name}_scale_inv"])
        assert model.params.layers[1].attention.k_b.dtype == jnp.dtype(dtype or "bfloat16")
        specs = params.named_leaves(params.abstract(model.config), params.is_spec)
        for path, leaf in leaves_of(model).items():
            assert isinstance(leaf, BlockScaled) == specs[path].block_scaled, path


@pytest.mark.parametrize("quantization_config", [True, False])
def test_fp8_is_decided_by_the_scales_alone(
    tmp_path: Path, fp8: dict[str, np.ndarray], quantization_config: bool
) -> None:
    """With the section but without scales, and the other way round."""
    tensors = dequantized_tensors(fp8) if quantization_config else fp8
    write_folder(tmp_path / "m", raw_config(quantized=quantization_config), tensors)
    model = load(tmp_path / "m", dtype="float32")
    assert isinstance(model.params.mtp.mlp.down, BlockScaled) != quantization_config
    assert model.config.quantization == (None if quantization_config else 128)


def test_float32_twin_has_the_dequantised_values(tmp_path: Path, fp8: dict[str, np.ndarray]) -> None:
    from glm_jax.quantize import dequantized

    write_folder(tmp_path / "fp8", raw_config(quantized=True), fp8)
    write_folder(tmp_path / "twin", raw_config(), dequantized_tensors(fp8))
    fp8_model, twin = load(tmp_path / "fp8", dtype="float32"), load(tmp_path / "twin", dtype="float32")
    assert same(dequantized(fp8_model).params, twin.params)


def test_leaves_that_cannot_stay_fp8_are_dequantised(
    tmp_path: Path, fp8: dict[str, np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    """An fp8 kv_b_proj (it is split), and one plain expert among fp8 ones."""
    split, lone = (
        f"{TEXT}layers.1.self_attn.kv_b_proj.weight",
        f"{TEXT}layers.3.mlp.experts.1.down_proj.weight",
    )
    tensors = dict(fp8)
    tensors[split] = tensors[split].astype(ml_dtypes.float8_e4m3fn)
    tensors[f"{split}_scale_inv"] = np.full((1, 1), 0.5, np.float32)
    plain = dequantized_tensors(tensors)
    tensors[lone] = plain[lone].astype(ml_dtypes.bfloat16)
    del tensors[f"{lone}_scale_inv"]
    write_folder(tmp_path / "m", raw_config(quantized=True), tensors)
    with caplog.at_level(logging.WARNING, logger="glm_jax"):
        model = load(tmp_path / "m", dtype="float32")
    assert "3 fp8 parameters were dequantised" in caplog.text
    np.testing.assert_array_equal(model.params.layers[1].attention.v_b[1], plain[split][32:40])
    down = model.params.layers[3].mlp.down
    np.testing.assert_array_equal(down[0], plain[lone.replace(".1.down", ".0.down")])
    np.testing.assert_array_equal(down[1], tensors[lone].astype(np.float32))


# broken checkpoints


def broken(
    tmp_path: Path, tensors: dict[str, np.ndarray], raw: dict[str, Any] | None = None, **arguments: Any
) -> str:
    """The message of the error that loading this checkpoint raises."""
    write_folder(tmp_path / "m", raw or raw_config(), tensors)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "m", **arguments)
    return str(error.value)


def test_all_problems_are_listed_in_one_error(tmp_path: Path, fp8: dict[str, np.ndarray]) -> None:
    names = {
        "missing": f"{TEXT}layers.0.self_attn.k_proj.weight",
        "shape": f"{TEXT}layers.1.self_attn.kv_b_proj.weight",
        "integer": f"{TEXT}layers.2.self_attn.dt_bias",
        "scaled": f"{TEXT}layers.1.mlp.experts.3.gate_proj.weight",
        "scaleless": f"{TEXT}layers.1.self_attn.q_b_proj.weight",
        "scale": f"{TEXT}layers.3.mlp.shared_experts.down_proj.weight_scale_inv",
        "dtype": f"{TEXT}layers.0.mlp.gate_proj.weight_scale_inv",
    }
    tensors = dict(fp8)
    del tensors[names["missing"]], tensors[names["scaleless"] + "_scale_inv"]
    tensors[names["shape"]] = tensors[names["shape"]].T
    tensors[names["integer"]] = tensors[names["integer"]].astype(ml_dtypes.float8_e4m3fn)
    tensors[names["scaled"]] = tensors[names["scaled"]].astype(np.float32)
    tensors[names["scale"]] = tensors[names["scale"]].T
    tensors[names["dtype"]] = tensors[names["dtype"]].astype(np.float16)
    tensors["model.extra"] = np.zeros(3, np.float32)
    message = broken(tmp_path, tensors, raw_config(quantized=True))
    for line in (
        f"{names['missing']}: missing, expected BF16 or F16 or F32 or F64 [12, 40]",
        f"{names['shape']}: shape [24, 40], expected [40, 24]",
        f"{names['integer']}: dtype F8_E4M3, expected BF16 or F16 or F32 or F64 (fp8 needs",
        f"{names['scaled']}: dtype F32, expected F8_E4M3 (there is a {names['scaled']}_scale_inv)",
        f"{names['scaleless']}: dtype F8_E4M3, expected",
        f"{names['scale']}: shape [2, 1], expected [1, 2]",
        f"{names['dtype']}: dtype F16, expected F32",
        "model.extra: unexpected, F32 [3]",
    ):
        assert line in message
    assert "8 problems" in message and message.count("\n") == 8


def test_checkpoint_without_the_mtp_layer(tmp_path: Path, disk: dict[str, np.ndarray]) -> None:
    """As transformers re-saves it: the layer is gone, the configuration still counts it."""
    tensors = {name: tensor for name, tensor in disk.items() if "layers.4." not in name}
    message = broken(tmp_path, tensors)
    assert "layers.4.eh_proj.weight: missing" in message and "num_nextn_predict_layers=1" in message
    write_folder(tmp_path / "0", raw_config(num_nextn_predict_layers=0), tensors)
    assert load(tmp_path / "0").params.mtp is None


def test_mtp_layer_that_the_configuration_does_not_count(tmp_path: Path, disk: dict[str, np.ndarray]) -> None:
    message = broken(tmp_path, disk, raw_config(num_nextn_predict_layers=0))
    assert "layers.4.eh_proj.weight: unexpected" in message


def test_mixed_dtypes_in_one_leaf_need_a_dtype(tmp_path: Path, disk: dict[str, np.ndarray]) -> None:
    name = f"{TEXT}layers.0.self_attn.v_proj.weight"
    tensors = {**disk, name: disk[name].astype(np.float32)}
    assert "layers.0.attention.qkv_proj: dtype=None needs one dtype" in broken(tmp_path, tensors, dtype=None)
    load(tmp_path / "m", dtype="bfloat16")


def test_broken_files(tmp_path: Path, disk: dict[str, np.ndarray]) -> None:
    model = write_folder(tmp_path / "m", raw_config(), disk, shards=2)
    shard, index = model / "model-00002-of-00002.safetensors", model / "model.safetensors.index.json"
    content, weight_map = shard.read_bytes(), json.loads(index.read_text())["weight_map"]

    def fails(words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            load(model)

    shard.write_bytes(content[:-7])
    fails(r"00002\.safetensors: truncated: tensor data ends at byte \d+, file has \d+")
    shard.write_bytes(struct.pack("<Q", 40) + b"x" * 60)
    fails("corrupt: header is not valid JSON")
    shard.unlink()
    fails(r"names shards that are not there:\n  model-00002-of-00002\.safetensors")
    shard.write_bytes(content)
    name = next(iter(weight_map))
    index.write_text(json.dumps({"weight_map": {**weight_map, "ghost": shard.name}}))
    fails("ghost: not in model-00002")
    index.write_text(json.dumps({"weight_map": {k: v for k, v in weight_map.items() if k != name}}))
    fails(f"{name}: in model-00001-of-00002.safetensors but not in the index")
    index.write_text("{}")
    fails("weight_map")
    index.write_text("{")
    fails("not valid JSON")
    index.unlink()
    load(model)  # without an index every file counts
    (model / "copy.safetensors").write_bytes(content)
    fails("is in both copy.safetensors and model-00002")
    for file in model.glob("*.safetensors"):
        file.unlink()
    fails(r"no \*\.safetensors file")


def test_nothing_is_read_before_everything_is_checked(
    tmp_path: Path, disk: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    from glm_jax import loading

    def never(*_: Any) -> None:
        raise AssertionError("a leaf was read")

    monkeypatch.setattr(loading, "read_leaf", never)
    last = list(disk)[-1]
    message = broken(tmp_path, {name: tensor for name, tensor in disk.items() if name != last})
    assert f"{last}: missing" in message


def test_unknown_model_type(tmp_path: Path, disk: dict[str, np.ndarray]) -> None:
    write_folder(tmp_path / "m", {**raw_config(), "model_type": "llama"}, disk)
    with pytest.raises(ConfigError, match="model_type='llama'"):
        load(tmp_path / "m")


# where a checkpoint is found


def test_places_without_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        load(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load(tmp_path)
    monkeypatch.setattr(locating, "TINY_FOLDER", tmp_path / "package" / "tiny")
    with pytest.raises(FileNotFoundError, match=r"package/tiny"):
        load("tiny")


def test_tiny_is_the_shipped_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locating, "TINY_FOLDER", folder)
    assert load("tiny").source == folder


def test_hub_ids(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, "*.safetensors" in allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load("someone/some-model").source == folder
    assert asked == [("someone/some-model", True)]


def test_hub_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"someone/absent-model: .*Hub"):
        load("someone/absent-model")


def test_progress_is_shown(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(folder)
    assert "loading model: 100%" in capfd.readouterr().err


MEASURE = """
import re, sys
import jax
from glm_jax.loading import load

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

jax.block_until_ready(jax.numpy.zeros(()))
before = peak()
params = load(sys.argv[1]).params
print(before, peak(), sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_the_model_is_in_memory_once(tmp_path: Path) -> None:
    layers = 12
    raw = raw_config(
        hidden_size=512, intermediate_size=4096, num_hidden_layers=layers, num_nextn_predict_layers=0,
        layer_types=["linear_attention"] * layers, mlp_layer_types=["dense"] * layers,
        indexer_types=["full"] * layers,
    )  # fmt: skip
    tensors = {
        name: np.full(shape, 0.5, ml_dtypes.bfloat16)
        for name, (shape, _) in params.checkpoint_tensors(load_config(raw)).items()
    }
    write_folder(tmp_path / "m", raw, tensors, shards=2)
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "m")], capture_output=True, text=True, check=True
    )
    before, peak, size = map(int, run.stdout.split())
    assert size > 140e6
    # Beside the model: pages and host buffer of the largest leaf (8 MiB each), and the allocator's slack.
    assert peak - before < 1.4 * size
