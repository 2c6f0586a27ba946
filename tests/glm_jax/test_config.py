"""config.json -> Config: every spelling, every refusal, and the way back."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from glm_jax.config import Config, ConfigError, load_config
from glm_jax.config_writing import to_hugging_face
from tests.tiny_checkpoints import raw_config

FIXTURE = Path(__file__).parents[1] / "fixtures" / "glm5_3_flash_config.json"


def flat(**fields: Any) -> Config:
    return load_config({"model_type": "glm5_next_text", **fields})


def test_released_configuration() -> None:
    config = load_config(FIXTURE)
    assert config.num_layers == 45 and config.num_mtp_layers == 1
    assert config.mla_layers == (3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43)
    assert config.layer_kinds[44] == "kda" and len(config.kda_layers) == 34
    assert config.mlp_kinds == ("dense",) * 3 + ("moe",) * 42
    assert [config.indexer_kinds[layer] for layer in (2, 3, 43, 44)] == [None, "full", "full", None]
    assert (config.index_topk, config.index_kpool, config.index_heads) == (2048, 4, 32)
    assert (config.kda_heads, config.kda_head_dim, config.conv_kernel) == (64, 128, 4)
    assert (config.gate_lower_bound, config.quantization, config.dtype) == (-5.0, 128, "bfloat16")
    assert config.eos_token_ids == (154820, 154827, 154829) and config.pad_token_id == 154820
    assert config.vision is not None and config.vision.out_hidden_size == 4096


def test_flat_file_reads_as_the_nested_one() -> None:
    raw = json.loads(FIXTURE.read_text())
    text = raw.pop("text_config")
    for model_type in ("glm5_next", "glm5_next_text"):
        assert load_config({**raw, **text, "model_type": model_type}) == load_config(FIXTURE)


def test_absent_fields_take_the_reference_defaults() -> None:
    config = flat()
    assert config.index_kpool == 16 and config.num_mtp_layers == 0 and config.index_share_for_mtp_iteration
    assert config.vision is None and config.quantization is None and config.eos_token_ids == ()
    assert config.layer_kinds[:5] == ("kda", "kda", "kda", "mla", "kda")


def test_is_a_static_argument() -> None:
    @jax.jit
    def plain(x: jax.Array) -> jax.Array:
        return x

    def scaled(x: jax.Array, config: Config) -> jax.Array:
        return plain(x) * config.hidden_size

    jitted = jax.jit(scaled, static_argnums=1)
    first, second = flat(hidden_size=8), flat(hidden_size=8)
    assert first == second and hash(first) == hash(second)
    assert jitted(jnp.ones(()), first) == 8.0
    assert jitted(jnp.ones(()), second) == 8.0
    assert jitted._cache_size() == 1


@pytest.mark.parametrize("spelling", ["deepseek_sparse_attention", "indexed_attention", "full_attention"])
def test_layer_type_spellings(spelling: str) -> None:
    config = flat(num_hidden_layers=3, layer_types=["linear_attention", spelling, "linear_attention"])
    assert config.layer_kinds == ("kda", "mla", "kda")


@pytest.mark.parametrize(
    "lists",
    [
        {"kda_layers": [0, 2]},
        {"full_attn_layers": [1, 3]},
        {"kda_layers": [0, 2], "full_attn_layers": [1, 3]},
    ],
)
def test_layer_kinds_from_the_linear_attention_section(lists: dict[str, list[int]]) -> None:
    config = flat(num_hidden_layers=4, linear_attn_config=lists)
    assert config.layer_kinds == ("kda", "mla", "kda", "mla")


def test_explicit_lists_win() -> None:
    config = flat(
        num_hidden_layers=2,
        layer_types=["linear_attention", "linear_attention"],
        linear_attn_config={"full_attn_layers": [0]},
        mlp_layer_types=["sparse", "dense"],
        first_k_dense_replace=2,
    )
    assert config.layer_kinds == ("kda", "kda") and config.mlp_kinds == ("moe", "dense")


@pytest.mark.parametrize(("dense", "expected"), [(0, 0), (1, 1), (9, 4), (None, 3)])
def test_leading_dense_layers(dense: int | None, expected: int) -> None:
    fields = {} if dense is None else {"first_k_dense_replace": dense}
    assert flat(num_hidden_layers=4, **fields).mlp_kinds.count("dense") == expected


def test_indexer_patterns_and_frequencies() -> None:
    every = {"num_hidden_layers": 6, "layer_types": ["indexed_attention"] * 6}
    names = {"full": "F", "shared": "S", None: "-"}

    def kinds(**fields: Any) -> str:
        return "".join(names[kind] for kind in flat(**every, **fields).indexer_kinds)

    assert kinds() == "FFFFFF"
    assert kinds(index_topk_pattern="FSSFSF") == "FSSFSF"
    assert kinds(index_topk_pattern=["full", "shared"] * 3) == "FSFSFS"
    # max(layer - offset + 1, 0) % frequency == 0, offset 2 unless given
    assert kinds(index_topk_freq=2) == "FFSFSF"
    assert kinds(index_topk_freq=3, index_skip_topk_offset=1) == "FSSFSS"
    assert kinds(indexer_types=["full"] * 6, index_topk_pattern="FSSSSS") == "FFFFFF"
    # entries of KDA layers mean nothing
    mixed = flat(num_hidden_layers=2, layer_types=["linear_attention", "indexed_attention"],
                 indexer_types=["shared", "full"])  # fmt: skip
    assert mixed.indexer_kinds == (None, "full")


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({}, -5.0),
        ({"linear_lower_bound": -3}, -3.0),
        ({"linear_lower_bound": None}, None),
        ({"linear_attn_config": {}}, -5.0),
        ({"linear_attn_config": {"gate_lower_bound": -2.0}, "linear_lower_bound": -3.0}, -2.0),
        ({"linear_attn_config": {"safe_gate": False}}, -5.0),
        ({"linear_attn_config": {"gate_lower_bound": None}}, -5.0),
        ({"linear_attn_config": {}, "linear_lower_bound": None}, -5.0),
        ({"linear_attn_config": {"safe_gate": True, "gate_lower_bound": None}}, -5.0),
        ({"linear_attn_config": {"safe_gate": False, "gate_lower_bound": None}}, None),
        ({"linear_attn_config": {"safe_gate": False}, "linear_lower_bound": None}, None),
        ({"linear_attn_config": {"safe_gate": False, "gate_lower_bound": 0}}, 0.0),
    ],
)
def test_gate_cases(fields: dict[str, Any], bound: float | None) -> None:
    assert flat(**fields).gate_lower_bound == bound


def test_end_tokens(tmp_path: Path) -> None:
    assert flat(eos_token_id=7).eos_token_ids == (7,)
    nested = {"model_type": "glm5_next", "eos_token_id": [3, 4], "text_config": {}}
    assert load_config(nested).eos_token_ids == (3, 4)
    (tmp_path / "config.json").write_text(json.dumps({**nested, "eos_token_id": [3]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 3]}))
    assert load_config(tmp_path).eos_token_ids == (3, 5)
    assert load_config(tmp_path / "config.json").eos_token_ids == (3,)


REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"model_type": "glm4_moe"}, ("model_type", "'glm4_moe'", "glm5_next")),
    ({"model_type": None}, ("model_type", "None")),
    ({"qk_rope_head_dim": 64}, ("qk_rope_head_dim", "64", "0")),
    ({"mla_use_nope": False}, ("mla_use_nope", "False")),
    ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'", "'silu'")),
    ({"scoring_func": "softmax"}, ("scoring_func", "'softmax'", "'sigmoid'")),
    ({"topk_method": "greedy"}, ("topk_method", "'greedy'", "'noaux_tc'")),
    ({"mhc": False}, ("mhc", "False")),
    ({"index_kpool_compress": False}, ("index_kpool_compress", "False", "True")),
    ({"index_kpool_always_select_tail": False}, ("index_kpool_always_select_tail", "False")),
    ({"index_topk": 30, "index_kpool": 4}, ("index_topk", "30", "4")),
    ({"index_topk": 0}, ("index_topk", "0")),
    ({"index_kpool": 0}, ("index_kpool", "0")),
    ({"num_key_value_heads": 8}, ("num_key_value_heads", "8", "64")),
    ({"q_lora_rank": None}, ("q_lora_rank", "None", "integer")),
    ({"tie_word_embeddings": True}, ("tie_word_embeddings", "True", "false")),
    ({"num_nextn_predict_layers": 2}, ("num_nextn_predict_layers", "2", "0 or 1")),
    ({"n_group": 5}, ("n_group", "5", "288")),
    ({"n_group": 288}, ("n_group", "288", "2 experts")),
    ({"n_group": 4, "topk_group": 5}, ("topk_group", "5", "4")),
    ({"n_group": 144, "topk_group": 1}, ("num_experts_per_tok", "8", "2")),
    ({"num_hidden_layers": "four"}, ("num_hidden_layers", "'four'", "integer")),
    ({"num_hidden_layers": True}, ("num_hidden_layers", "True", "integer")),
    ({"rms_norm_eps": "small"}, ("rms_norm_eps", "'small'")),
    ({"rms_norm_eps": float("inf")}, ("rms_norm_eps", "inf")),
    ({"layer_types": 3}, ("layer_types", "3", "list")),
    ({"layer_types": [["kda"]]}, ("layer_types[0]", "['kda']")),
    ({"linear_attn_config": {"kda_layers": [[0]]}}, ("kda_layers", "[[0]]")),
    ({"linear_attn_config": []}, ("linear_attn_config", "[]", "object")),
    ({"swiglu_limit": None}, ("swiglu_limit", "None")),
    ({"norm_topk_prob": 1}, ("norm_topk_prob", "1", "true or false")),
    ({"num_hidden_layers": 2, "layer_types": ["linear_attention"]}, ("layer_types", "num_hidden_layers=2")),
    (
        {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
        ("layer_types[0]", "'sliding_attention'"),
    ),
    ({"num_hidden_layers": 1, "mlp_layer_types": ["moe"]}, ("mlp_layer_types[0]", "'moe'", "sparse")),
    ({"num_hidden_layers": 2, "indexer_types": ["full"]}, ("indexer_types", "num_hidden_layers=2")),
    ({"num_hidden_layers": 4, "indexer_types": ["full"] * 3 + ["shared"]}, ("indexer_types", "first")),
    ({"num_hidden_layers": 4, "linear_attn_config": {"kda_layers": [1, 2, 3, 4]}}, ("kda_layers", "0-based")),
    (
        {"num_hidden_layers": 4, "linear_attn_config": {"kda_layers": [0, 1], "full_attn_layers": [3]}},
        ("full_attn_layers", "[3]"),
    ),
    ({"linear_attn_config": {"gate_lower_bound": 1.0}}, ("gate_lower_bound", "1.0")),
    ({"linear_attn_config": {"gate_lower_bound": "low"}}, ("gate_lower_bound", "'low'")),
    ({"linear_attn_config": {"short_conv_kernel_size": 1}}, ("short_conv_kernel_size", "1")),
    ({"eos_token_id": 154880}, ("eos_token_id", "154880", "154879")),
    ({"eos_token_id": ["a"]}, ("eos_token_id", "'a'")),
    ({"pad_token_id": -1}, ("pad_token_id", "-1")),
    ({"dtype": "int8"}, ("dtype", "'int8'", "bfloat16")),
    ({"quantization_config": {"quant_method": "awq"}}, ("quant_method", "'awq'", "'fp8'")),
    ({"quantization_config": {"weight_block_size": [64, 64]}}, ("weight_block_size", "64", "128")),
    ({"quantization_config": {"fmt": "e5m2"}}, ("fmt", "'e5m2'")),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_refusals_name_field_value_and_bound(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        flat(**fields)
    for word in words:
        assert word in str(error.value)
    assert "not supported" in str(error.value)


def test_replacing_a_field_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="index_topk=33"):
        dataclasses.replace(flat(), index_topk=33)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        load_config(tmp_path / "absent" / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    "raw",
    [
        raw_config(),
        raw_config(quantized=True, vision=True),
        raw_config(linear_attn_config={"safe_gate": False, "gate_lower_bound": None}),
        raw_config(
            index_topk_pattern="FFFF", indexer_types=None, mlp_layer_types=None, first_k_dense_replace=1
        ),
        {"model_type": "glm5_next_text", "linear_lower_bound": None},
        json.loads(FIXTURE.read_text()),
    ],
    ids=["nested", "quantized", "softplus", "shorthands", "flat", "released"],
)
def test_written_configuration_reads_back_equal(raw: dict[str, Any]) -> None:
    config, before = load_config(raw), copy.deepcopy(raw)
    for base in (None, raw):
        written = json.loads(json.dumps(to_hugging_face(config, dtype=config.dtype, base=base)))
        assert load_config(written) == config
        text = written.get("text_config", written)
        for name in ("layer_types", "mlp_layer_types", "indexer_types"):
            assert len(text[name]) == config.num_layers
        assert not any(name.startswith("index_topk_") for name in text)
    assert raw == before


def test_writing_keeps_what_it_does_not_know() -> None:
    raw = raw_config(vision=True, initializer_range=0.03)
    written = to_hugging_face(load_config(raw), dtype="float32", base=raw)
    assert written["image_token_id"] == 90 and written["text_config"]["initializer_range"] == 0.03
    assert written["text_config"]["dtype"] == "float32" and "quantization_config" not in written
