"""Hugging Face config.json -> frozen `Config`.

The only place that reads config.json's field names. Absent fields take the defaults of transformers'
`Glm5NextTextConfig`; fields whose value would need code that does not exist are refused by name.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm_jax.config_schema import FP8_BLOCK, Config, ConfigError, VisionConfig, refuse
from glm_jax.config_section import Section, read_json

__all__ = ["Config", "ConfigError", "VisionConfig", "load_config", "read_json"]

MODEL_TYPE = "glm5_next"
TEXT_MODEL_TYPE = "glm5_next_text"
_ATTENTION_KINDS = {
    "linear_attention": "kda",
    "deepseek_sparse_attention": "mla",
    "indexed_attention": "mla",
    "full_attention": "mla",  # transformers renames it to indexed_attention
}
_MLP_KINDS = {"dense": "dense", "sparse": "moe"}
_INDEXER_KINDS = {"full": "full", "shared": "shared", "F": "full", "S": "shared"}
# Fields of which one value is implemented; absent means that value.
_FIXED: dict[str, Any] = {
    "qk_rope_head_dim": 0,
    "mla_use_nope": True,
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_router_dtype": "float32",
    "moe_layer_freq": 1,
    "index_kpool_compress": True,
    "index_kpool_always_select_tail": True,
    "mhc": True,
}
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def load_config(path_or_dict: str | os.PathLike[str] | Mapping[str, Any]) -> Config:
    """Read a Hugging Face configuration.

    Args:
        path_or_dict: the parsed config.json, its path, or the folder that holds it. From a folder, the
            `eos_token_id` list of generation_config.json is added to the one of config.json.

    Returns:
        The frozen configuration.

    Raises:
        ConfigError: a field has a value that cannot be run; the message names it and what is supported.
        FileNotFoundError: there is no such file.
    """
    if isinstance(path_or_dict, Mapping):
        return _from_mapping(path_or_dict)
    path = Path(path_or_dict)
    if not path.is_dir():
        return _from_mapping(read_json(path))
    raw, generation = read_json(path / "config.json"), path / "generation_config.json"
    extra = read_json(generation).get("eos_token_id") if generation.is_file() else None
    return _from_mapping(raw, _token_ids("eos_token_id", extra))


def _from_mapping(raw: Mapping[str, Any], extra_eos: tuple[int, ...] = ()) -> Config:
    top = Section(raw)
    model_type = raw.get("model_type")
    if model_type not in (MODEL_TYPE, TEXT_MODEL_TYPE):
        raise refuse("model_type", model_type, f"{MODEL_TYPE!r} or {TEXT_MODEL_TYPE!r}")
    text = top.section("text_config") or top
    if text is not top and text.values.get("model_type", TEXT_MODEL_TYPE) != TEXT_MODEL_TYPE:
        raise refuse("text_config.model_type", text.values["model_type"], repr(TEXT_MODEL_TYPE))
    for name, supported in _FIXED.items():
        if text.values.get(name, supported) != supported:
            raise refuse(text.prefix + name, text.values[name], repr(supported))

    num_layers = text.integer("num_hidden_layers", 45)
    layer_kinds = _layer_kinds(text, num_layers)
    heads = text.integer("num_attention_heads", 64)
    if text.values.get("num_key_value_heads", heads) not in (heads, None):
        raise refuse(
            "num_key_value_heads", text.values["num_key_value_heads"], f"num_attention_heads={heads}"
        )
    linear = text.section("linear_attn_config") or Section({})
    return Config(
        vocab_size=text.integer("vocab_size", 154880),
        hidden_size=text.integer("hidden_size", 4096),
        num_layers=num_layers,
        layer_kinds=layer_kinds,
        mlp_kinds=_mlp_kinds(text, num_layers),
        intermediate_size=text.integer("intermediate_size", 12288),
        moe_intermediate_size=text.integer("moe_intermediate_size", 2048),
        num_experts=_aliased(text, "n_routed_experts", "num_local_experts", 288),
        num_experts_per_token=text.integer("num_experts_per_tok", 8),
        num_expert_groups=text.integer("n_group", 1),
        topk_groups=text.integer("topk_group", 1),
        norm_topk_prob=text.boolean("norm_topk_prob", True),
        routed_scaling_factor=text.number("routed_scaling_factor", 2.5),
        num_shared_experts=text.integer("n_shared_experts", 1),
        swiglu_limit=text.number("swiglu_limit", 10.0),
        rms_norm_eps=text.number("rms_norm_eps", 1e-5),
        attention_bias=text.boolean("attention_bias", False),
        num_heads=heads,
        q_lora_rank=text.integer("q_lora_rank", 1536),
        kv_lora_rank=text.integer("kv_lora_rank", 512),
        qk_head_dim=text.integer("qk_nope_head_dim", 256),
        v_head_dim=text.integer("v_head_dim", 256),
        index_heads=text.integer("index_n_heads", 32),
        index_head_dim=text.integer("index_head_dim", 128),
        index_topk=text.integer("index_topk", 2048),
        index_kpool=text.integer("index_kpool", 16),
        indexer_kinds=_indexer_kinds(text, layer_kinds),
        index_share_for_mtp_iteration=text.boolean("index_share_for_mtp_iteration", True),
        kda_heads=linear.integer("num_heads", text.integer("linear_num_heads", 64)),
        kda_head_dim=linear.integer("head_dim", text.integer("linear_head_dim", 128)),
        conv_kernel=linear.integer("short_conv_kernel_size", text.integer("linear_conv_kernel_dim", 4)),
        gate_lower_bound=_gate_lower_bound(text),
        hc_streams=text.integer("hc_mult", 4),
        hc_eps=text.number("hc_eps", 1e-6),
        hc_sinkhorn_iterations=text.integer("hc_sinkhorn_iters", 20),
        num_mtp_layers=text.integer("num_nextn_predict_layers", 0, minimum=0),
        max_position_embeddings=text.integer("max_position_embeddings", 1048576),
        eos_token_ids=_eos_token_ids(top, text, extra_eos),
        pad_token_id=next(iter(_token_ids("pad_token_id", _first(text, top, "pad_token_id"))), None),
        dtype=_dtype(top, text),
        quantization=_quantization(top, text),
        vision=_vision(top),
        tie_word_embeddings=top.boolean("tie_word_embeddings", False)
        or text.boolean("tie_word_embeddings", False),
    )


def _aliased(section: Section, name: str, alias: str, default: int) -> int:
    return section.integer(name if name in section.values or alias not in section.values else alias, default)


def _layer_kinds(text: Section, num_layers: int) -> tuple[Any, ...]:
    explicit = text.names("layer_types", _ATTENTION_KINDS)
    if explicit is not None:
        return explicit
    linear = text.section("linear_attn_config")
    kda = linear.values.get("kda_layers") if linear else None
    full = linear.values.get("full_attn_layers") if linear else None
    every = set(range(num_layers))
    for name, layers in (("kda_layers", kda), ("full_attn_layers", full)):
        if layers is not None and not (
            isinstance(layers, list | tuple) and all(x in range(num_layers) for x in layers)
        ):
            raise refuse(
                f"linear_attn_config.{name}", layers, f"0-based layer numbers, 0 to {num_layers - 1}"
            )
    if kda is None and full is None:
        kda_set = {layer for layer in every if layer % 4 != 3}
    else:
        kda_set = set(kda) if kda is not None else every - set(full or ())
        if full is not None and kda_set != every - set(full):
            raise refuse(
                "linear_attn_config.full_attn_layers",
                list(full),
                f"exactly the layers of 0 to {num_layers - 1} that kda_layers={sorted(kda_set)} leaves out",
            )
    return tuple("kda" if layer in kda_set else "mla" for layer in range(num_layers))


def _mlp_kinds(text: Section, num_layers: int) -> tuple[Any, ...]:
    explicit = text.names("mlp_layer_types", _MLP_KINDS)
    if explicit is not None:
        return explicit
    dense = min(text.integer("first_k_dense_replace", 3, minimum=0), num_layers)
    return ("dense",) * dense + ("moe",) * (num_layers - dense)


def _indexer_kinds(text: Section, layer_kinds: tuple[str, ...]) -> tuple[Any, ...]:
    """`indexer_types`, else `index_topk_pattern`, else transformers' frequency rule; None on KDA layers."""
    kinds = text.names("indexer_types", _INDEXER_KINDS)
    name = "indexer_types"
    if kinds is None:
        kinds, name = text.names("index_topk_pattern", _INDEXER_KINDS), "index_topk_pattern"
    if kinds is None:
        frequency = max(text.integer("index_topk_freq", 1, minimum=0), 1)
        offset = text.integer("index_skip_topk_offset", 2, minimum=0)
        kinds = tuple(
            "full" if max(layer - offset + 1, 0) % frequency == 0 else "shared"
            for layer in range(len(layer_kinds))
        )
    if len(kinds) != len(layer_kinds):
        raise refuse(name, list(kinds), f"one entry a layer, num_hidden_layers={len(layer_kinds)}")
    return tuple(kind if layer == "mla" else None for kind, layer in zip(kinds, layer_kinds, strict=True))


def _gate_lower_bound(text: Section) -> float | None:
    """The forget gate's bound, or None for the softplus gate.

    transformers: `linear_attn_config.gate_lower_bound` overrides `linear_lower_bound` (default -5), and with
    that section a null bound becomes -5 unless its `safe_gate` is false; `safe_gate` false alone keeps -5.
    """
    section, name = text, "linear_lower_bound"
    bound = text.values.get(name, -5.0)
    linear = text.section("linear_attn_config")
    if linear is not None:
        if "gate_lower_bound" in linear.values:
            section, name = linear, "gate_lower_bound"
            bound = linear.values[name]
        if bound is None and linear.boolean("safe_gate", True):
            return -5.0
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float)):
        raise refuse(section.prefix + name, bound, "null or a number not above 0")
    return None if bound is None else float(bound)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    values = [] if value is None else value if isinstance(value, list | tuple) else [value]
    for token in values:
        if isinstance(token, bool) or not isinstance(token, int):
            raise refuse(name, value, "an integer or a list of integers")
    return tuple(values)


def _eos_token_ids(top: Section, text: Section, extra: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_token_ids("eos_token_id", _first(text, top, "eos_token_id")) + extra))


def _first(text: Section, top: Section, name: str) -> Any:
    """The text section's value, else the top level's, which carries it in some released configurations."""
    return text.values[name] if text.values.get(name) is not None else top.values.get(name)


def _dtype(top: Section, text: Section) -> str:
    for section in (text, top):
        for name in ("dtype", "torch_dtype"):
            value = section.values.get(name)
            if value is not None:
                if value not in _DTYPES:
                    raise refuse(section.prefix + name, value, f"one of {list(_DTYPES)}")
                return value
    return "bfloat16"


def _quantization(top: Section, text: Section) -> int | None:
    section = top.section("quantization_config") or text.section("quantization_config")
    if section is None:
        return None
    for name, supported in (("quant_method", "fp8"), ("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        if section.values.get(name, supported) != supported:
            raise refuse(section.prefix + name, section.values[name], repr(supported))
    block = section.values.get("weight_block_size", [FP8_BLOCK, FP8_BLOCK])
    if not isinstance(block, list | tuple) or list(block) != [FP8_BLOCK, FP8_BLOCK]:
        raise refuse(section.prefix + "weight_block_size", block, str([FP8_BLOCK, FP8_BLOCK]))
    return FP8_BLOCK


def _vision(top: Section) -> VisionConfig | None:
    section = top.section("vision_config")
    if section is None:
        return None
    defaults = {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "in_channels": 3,
        "image_size": 336, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2,
        "out_hidden_size": 1536, "projection_intermediate_size": 10240,
    }  # fmt: skip
    return VisionConfig(
        **{name: section.integer(name, default) for name, default in defaults.items()},
        rms_norm_eps=section.number("rms_norm_eps", 1e-5),
        swiglu_limit=section.number("swiglu_limit", 10.0),
        attention_bias=section.boolean("attention_bias", True),
        hidden_act=str(section.values.get("hidden_act", "silu")),
    )
