"""`Config` -> Hugging Face config.json, with every layer list spelled out."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from glm_jax.config import MODEL_TYPE, TEXT_MODEL_TYPE, Config
from glm_jax.config_schema import FP8_BLOCK
from glm_jax.parameter_layers import abstract
from glm_jax.parameter_spec import is_spec, named_leaves

# Shorthands for the layer lists, which are written out instead.
_SHORTHANDS = ("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")


def to_hugging_face(config: Config, *, dtype: str, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json that `load_config` reads back to `config`.

    Args:
        config: the model.
        dtype: of the saved weights, "bfloat16" for instance.
        base: the config.json the model was loaded from; its further fields and its shape (flat or with a
            `text_config`) are kept.
    """
    raw = dict(base or {"model_type": MODEL_TYPE, "architectures": ["Glm5NextForConditionalGeneration"]})
    flat = base is not None and base.get("text_config") is None
    text = dict(raw if flat else raw.get("text_config") or {"model_type": TEXT_MODEL_TYPE})
    for name in (*_SHORTHANDS, "torch_dtype", "quantization_config"):
        text.pop(name, None)
    text.update(_text_fields(config), dtype=dtype)
    text["linear_attn_config"] = _linear_attention(config, text.get("linear_attn_config") or {})
    if flat:
        quantized = raw.get("quantization_config")
        raw = text
    else:
        quantized = raw.pop("quantization_config", None) or (raw.get("text_config") or {}).get(
            "quantization_config"
        )
        raw.pop("torch_dtype", None)
        raw.update(text_config=text, dtype=dtype, tie_word_embeddings=config.tie_word_embeddings)
    if config.quantization:
        raw["quantization_config"] = quantized or _quantization(config)
    if config.vision is None:
        raw.pop("vision_config", None)
    elif not raw.get("vision_config"):
        raw["vision_config"] = {"model_type": "glm5_next_vision", **dataclasses.asdict(config.vision)}
    return raw


def _text_fields(config: Config) -> dict[str, Any]:
    attention = {"kda": "linear_attention", "mla": "deepseek_sparse_attention"}
    mlp = {"dense": "dense", "moe": "sparse"}
    leading_dense = next(
        (layer for layer, kind in enumerate(config.mlp_kinds) if kind != "dense"), config.num_layers
    )
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "layer_types": [attention[kind] for kind in config.layer_kinds],
        "mlp_layer_types": [mlp[kind] for kind in config.mlp_kinds],
        "first_k_dense_replace": leading_dense,
        # KDA layers have no indexer; transformers wants an entry for them all the same.
        "indexer_types": [kind or "full" for kind in config.indexer_kinds],
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_token,
        "n_group": config.num_expert_groups,
        "topk_group": config.topk_groups,
        "norm_topk_prob": config.norm_topk_prob,
        "routed_scaling_factor": config.routed_scaling_factor,
        "n_shared_experts": config.num_shared_experts,
        "swiglu_limit": config.swiglu_limit,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_head_dim,
        "qk_rope_head_dim": 0,
        "v_head_dim": config.v_head_dim,
        "index_n_heads": config.index_heads,
        "index_head_dim": config.index_head_dim,
        "index_topk": config.index_topk,
        "index_kpool": config.index_kpool,
        "index_share_for_mtp_iteration": config.index_share_for_mtp_iteration,
        "hc_mult": config.hc_streams,
        "hc_eps": config.hc_eps,
        "hc_sinkhorn_iters": config.hc_sinkhorn_iterations,
        "num_nextn_predict_layers": config.num_mtp_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "pad_token_id": config.pad_token_id,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def _linear_attention(config: Config, base: Mapping[str, Any]) -> dict[str, Any]:
    section = {
        **base,
        "num_heads": config.kda_heads,
        "head_dim": config.kda_head_dim,
        "short_conv_kernel_size": config.conv_kernel,
        "gate_lower_bound": config.gate_lower_bound,
        "kda_layers": list(config.kda_layers),
        "full_attn_layers": list(config.mla_layers),
    }
    if config.gate_lower_bound is None:
        section["safe_gate"] = False  # without it a null bound reads as -5
    return section


def _quantization(config: Config) -> dict[str, Any]:
    """The released quantization section; the modules it leaves alone are those that stay unquantised here."""
    kept = [
        source.name.removesuffix(".weight")
        for spec in named_leaves(abstract(config), is_spec).values()
        if len(spec.shape) > 1 and not spec.block_scaled
        for source in spec.sources
        if source.name.endswith(".weight")
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": list(dict.fromkeys(kept)),
    }
