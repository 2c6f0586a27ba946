"""Tiny random glm5_next configurations, as the dictionaries that a released config.json holds.

An architecture fixes the features under test (pool size, indexer kinds, gate, groups); the free sizes are
drawn from a seed, so that another `ORACLE_SEED` gives models nobody has run before.
"""

from typing import Any

import numpy as np

VOCABULARY = 96

VISION = {
    "model_type": "glm5_next_vision",
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "in_channels": 3,
    "image_size": 28,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "projection_intermediate_size": 24,
    "rms_norm_eps": 1e-5,
    "swiglu_limit": 10.0,
    "attention_bias": True,
    "hidden_act": "silu",
}

KDA, MLA = "linear_attention", "deepseek_sparse_attention"
ALTERNATING = (KDA, MLA, KDA, MLA)

# name -> (layer types, indexer types, overrides of the text config). All gate spellings of MODEL.md k occur.
FEATURES: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "pool4": (ALTERNATING, ("full",) * 4, {"index_kpool": 4, "index_topk": 16}),
    "pool16": (ALTERNATING, ("full",) * 4, {"index_kpool": 16, "index_topk": 32, "attention_bias": True}),
    "shared": (
        (KDA, MLA, MLA, KDA, MLA),
        ("full", "full", "shared", "full", "full"),
        {"index_kpool": 4, "index_topk": 32},
    ),
    # One selection serves across a KDA layer and twice in a row: the reference does this with our help only.
    "far_shared": (
        (MLA, KDA, MLA, MLA),
        ("full", "full", "shared", "shared"),
        {"index_kpool": 4, "index_topk": 16},
    ),
    "softplus": (
        ALTERNATING,
        ("full",) * 4,
        {"index_kpool": 4, "index_topk": 24, "gate": {"safe_gate": False, "gate_lower_bound": None}},
    ),
    "groups": (
        ALTERNATING,
        ("full",) * 4,
        {
            "index_kpool": 16,
            "index_topk": 64,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "n_shared_experts": 2,
            "gate": {"safe_gate": False},  # this alone keeps the bound of -5
        },
    ),
    "clamped": (
        (KDA, MLA, MLA, MLA),
        ("full", "full", "shared", "full"),
        {
            "index_kpool": 8,
            "index_topk": 16,
            "swiglu_limit": 1.0,
            "attention_bias": True,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 5,
            "hc_eps": 1e-2,
            "short_conv_kernel_size": 3,
            "gate": {"gate_lower_bound": -3.0},
        },
    ),
    "softplus_absent": (
        ALTERNATING,
        ("full",) * 4,
        {
            "index_kpool": 4,
            "index_topk": 16,
            "index_share_for_mtp_iteration": False,
            "linear_lower_bound": None,
            "gate": {"safe_gate": False},
        },
    ),
    "softplus_flat": (
        (KDA, KDA, MLA, MLA),
        ("full", "full", "full", "full"),
        {"index_kpool": 4, "index_topk": 20, "linear_lower_bound": None, "gate": None},
    ),
}


def configuration(name: str, seed: int, **overrides: Any) -> dict[str, Any]:
    """A config.json of the released form for architecture `name`; sizes are drawn from `seed`.

    The layer lists are always spelled out: transformers 5.24 ignores `kda_layers` and
    `first_k_dense_replace`.
    """
    layer_types, indexer_types, features = FEATURES[name]
    features = {**features, **overrides}
    generator = np.random.default_rng([seed, sum(name.encode())])

    def pick(*choices: int) -> int:
        return int(generator.choice(choices))

    kda_heads, kda_head_dim = pick(2, 3), pick(16, 24)
    kernel = features.pop("short_conv_kernel_size", 4)
    gate = features.pop("gate", {"gate_lower_bound": -5.0})
    text: dict[str, Any] = {
        "model_type": "glm5_next_text",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": pick(40, 48, 64),
        "intermediate_size": pick(48, 72),
        "moe_intermediate_size": pick(24, 40),
        "num_hidden_layers": len(layer_types),
        "num_nextn_predict_layers": 1,
        "layer_types": list(layer_types),
        "mlp_layer_types": ["dense"] + ["sparse"] * (len(layer_types) - 1),
        "first_k_dense_replace": 1,
        "indexer_types": list(indexer_types),
        "num_attention_heads": (heads := pick(2, 4)),
        "num_key_value_heads": heads,
        "q_lora_rank": pick(24, 40),
        "kv_lora_rank": pick(16, 32),
        "qk_nope_head_dim": pick(16, 24),
        "qk_rope_head_dim": 0,
        "v_head_dim": pick(16, 24),
        "mla_use_nope": True,
        "attention_bias": False,
        "index_n_heads": pick(2, 4),
        "index_head_dim": pick(8, 16),
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "index_share_for_mtp_iteration": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": pick(2, 3),
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "mhc": True,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": [1, 2],
    }
    if gate is None:
        text |= {
            "linear_num_heads": kda_heads,
            "linear_head_dim": kda_head_dim,
            "linear_conv_kernel_dim": kernel,
        }
    else:
        text["linear_attn_config"] = {
            "num_heads": kda_heads,
            "head_dim": kda_head_dim,
            "short_conv_kernel_size": kernel,
            "kda_layers": [i for i, kind in enumerate(layer_types) if kind == KDA],
            "full_attn_layers": [i for i, kind in enumerate(layer_types) if kind == MLA],
            **gate,
        }
    text |= features
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "tie_word_embeddings": False,
        "image_token_id": VOCABULARY - 6,
        "video_token_id": VOCABULARY - 5,
        "image_start_token_id": VOCABULARY - 4,
        "image_end_token_id": VOCABULARY - 3,
        "video_start_token_id": VOCABULARY - 2,
        "video_end_token_id": VOCABULARY - 1,
        "text_config": text,
        "vision_config": {**VISION, "out_hidden_size": text["hidden_size"]},
    }


def kda_sizes(text: dict[str, Any]) -> tuple[int, int, int]:
    """Heads, head dim and convolution taps of the KDA layers."""
    nested = text.get("linear_attn_config")
    if nested is None:
        return text["linear_num_heads"], text["linear_head_dim"], text["linear_conv_kernel_dim"]
    return nested["num_heads"], nested["head_dim"], nested["short_conv_kernel_size"]
