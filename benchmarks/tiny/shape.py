"""The shape of the tiny model, and the Hugging Face config.json that describes it."""

import dataclasses
from typing import Any

MLA_PERIOD = 4  # every fourth layer is sparse attention, as released


@dataclasses.dataclass(frozen=True)
class Shape:
    """Widths of a glm5_next model in its 3:1 pattern. Counts that a mesh of 8 splits are divisible by 8.

    Raises ValueError for a layer count that does not end in a sparse attention layer.
    """

    vocab_size: int = 1536
    hidden_size: int = 192
    num_layers: int = 8
    dense_width: int = 384  # layer 0
    expert_width: int = 32
    num_experts: int = 8
    experts_per_token: int = 2
    routed_scaling_factor: float = 2.5
    swiglu_limit: float = 10.0
    num_heads: int = 8
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_head_dim: int = 64
    v_head_dim: int = 32
    index_heads: int = 4
    index_head_dim: int = 32
    index_topk: int = 256
    index_kpool: int = 4
    kda_heads: int = 8
    kda_head_dim: int = 32
    conv_kernel: int = 4
    gate_lower_bound: float = -5.0
    hc_streams: int = 4
    hc_eps: float = 1e-6
    hc_sinkhorn_iterations: int = 20
    rms_norm_eps: float = 1e-5
    compute_dtype: str = "bfloat16"  # of the training forward; the checkpoint is bfloat16 always
    kda_chunk: int = 64

    def __post_init__(self) -> None:
        if self.num_layers % MLA_PERIOD:
            raise ValueError(f"num_layers is {self.num_layers}, not a multiple of {MLA_PERIOD}")

    @property
    def groups(self) -> int:
        """Runs of three KDA layers and one MLA layer."""
        return self.num_layers // MLA_PERIOD


def hugging_face_config(shape: Shape, special_ids: dict[str, int], eos_ids: list[int]) -> dict[str, Any]:
    """config.json of the released layout (MODEL.md a): nested, every per-layer list spelled out."""
    kinds = [
        "deepseek_sparse_attention" if i % MLA_PERIOD == MLA_PERIOD - 1 else "linear_attention"
        for i in range(shape.num_layers)
    ]
    linear = {
        "num_heads": shape.kda_heads,
        "head_dim": shape.kda_head_dim,
        "short_conv_kernel_size": shape.conv_kernel,
        "gate_lower_bound": shape.gate_lower_bound,
        "kda_layers": [i for i, kind in enumerate(kinds) if kind == "linear_attention"],
        "full_attn_layers": [i for i, kind in enumerate(kinds) if kind != "linear_attention"],
    }
    text = {
        "model_type": "glm5_next_text",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.dense_width,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "head_dim": 0,
        "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_nope_head_dim": shape.qk_head_dim,
        "qk_rope_head_dim": 0,
        "qk_head_dim": shape.qk_head_dim,
        "v_head_dim": shape.v_head_dim,
        "mla_use_nope": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": shape.rms_norm_eps,
        "hidden_act": "silu",
        "swiglu_limit": shape.swiglu_limit,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense"] + ["sparse"] * (shape.num_layers - 1),
        "moe_intermediate_size": shape.expert_width,
        "n_routed_experts": shape.num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": shape.experts_per_token,
        "routed_scaling_factor": shape.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "moe_router_dtype": "float32",
        "num_nextn_predict_layers": 1,
        "index_n_heads": shape.index_heads,
        "index_head_dim": shape.index_head_dim,
        "index_topk": shape.index_topk,
        "index_kpool": shape.index_kpool,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "index_share_for_mtp_iteration": True,
        "indexer_types": ["full"] * shape.num_layers,
        "indexer_rope_interleave": True,
        "mhc": True,
        "hc_mult": shape.hc_streams,
        "hc_eps": shape.hc_eps,
        "hc_sinkhorn_iters": shape.hc_sinkhorn_iterations,
        "linear_attn_config": linear,
        "layer_types": kinds,
        "tie_word_embeddings": False,
        "use_cache": True,
        "eos_token_id": eos_ids,
        "pad_token_id": eos_ids[0],
    }
    media = {
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    }
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "eos_token_id": eos_ids,
        "pad_token_id": eos_ids[0],
        **{name: special_ids[token] for name, token in media.items()},
        "text_config": text,
    }
