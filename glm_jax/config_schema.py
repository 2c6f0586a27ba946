"""The frozen model description that every other module reads, and the bounds its values must keep.

`glm_jax.config` builds it from a Hugging Face config.json. Messages use the config.json spelling of a field,
because that is the file a reader can open and correct.
"""

import dataclasses
import math
from typing import Literal

FP8_BLOCK = 128


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the field, its value and what is supported."""


def refuse(field: str, value: object, supported: str) -> ConfigError:
    """The one form of a refusal: `field=value is not supported: supported`."""
    return ConfigError(f"config: {field}={value!r} is not supported: {supported}")


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """Description of the vision tower (config.json `vision_config`): enough to name and shape its tensors.

    The tower itself is not computed; its tensors are skipped on load and copied through on save.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    image_size: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    projection_intermediate_size: int
    rms_norm_eps: float
    swiglu_limit: float
    attention_bias: bool
    hidden_act: str


@dataclasses.dataclass(frozen=True)
class Config:
    """A glm5_next text model. Hashable, so it can be a static argument of `jax.jit`.

    `layer_kinds`, `mlp_kinds` and `indexer_kinds` have one entry for each of the `num_layers` main layers;
    the multi-token-prediction layer (`num_mtp_layers` 0 or 1) is always MLA with its own indexer and a MoE.
    `indexer_kinds` is None for KDA layers. `gate_lower_bound` None selects the softplus forget gate.
    `index_topk` counts tokens; the indexer selects `index_topk // index_kpool` pools. `quantization` is the
    edge of the square fp8 blocks of a quantised checkpoint, or None.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_kinds: tuple[Literal["kda", "mla"], ...]
    mlp_kinds: tuple[Literal["dense", "moe"], ...]
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    num_expert_groups: int
    topk_groups: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    num_shared_experts: int
    swiglu_limit: float
    rms_norm_eps: float
    attention_bias: bool
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_head_dim: int
    v_head_dim: int
    index_heads: int
    index_head_dim: int
    index_topk: int
    index_kpool: int
    indexer_kinds: tuple[Literal["full", "shared"] | None, ...]
    index_share_for_mtp_iteration: bool
    kda_heads: int
    kda_head_dim: int
    conv_kernel: int
    gate_lower_bound: float | None
    hc_streams: int
    hc_eps: float
    hc_sinkhorn_iterations: int
    num_mtp_layers: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    dtype: str
    quantization: int | None
    vision: VisionConfig | None
    tie_word_embeddings: bool

    def __post_init__(self) -> None:
        _check_layers(self)
        _check_experts(self)
        _check_indexer(self)
        _check_values(self)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """Indices of the KDA layers, ascending."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "kda")

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """Indices of the MLA layers, ascending; the MTP layer is not among them."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "mla")

    @property
    def kda_channels(self) -> int:
        """Width of each of q, k and v in a KDA layer."""
        return self.kda_heads * self.kda_head_dim


def _check_layers(config: Config) -> None:
    if config.num_layers < 1:
        raise refuse("num_hidden_layers", config.num_layers, "at least 1")
    for field, kinds in (
        ("layer_types", config.layer_kinds),
        ("mlp_layer_types", config.mlp_kinds),
        ("indexer_types", config.indexer_kinds),
    ):
        if len(kinds) != config.num_layers:
            raise refuse(field, list(kinds), f"one entry a layer, num_hidden_layers={config.num_layers}")
    if config.num_mtp_layers not in (0, 1):
        raise refuse("num_nextn_predict_layers", config.num_mtp_layers, "0 or 1")
    if config.tie_word_embeddings:
        raise refuse("tie_word_embeddings", True, "false (a separate lm_head.weight)")
    if config.quantization not in (None, FP8_BLOCK):
        raise refuse(
            "weight_block_size", config.quantization, f"[{FP8_BLOCK}, {FP8_BLOCK}] or no quantization"
        )


def _check_experts(config: Config) -> None:
    groups, experts = config.num_expert_groups, config.num_experts
    if experts % groups or experts // groups < 2:
        # The group score is the sum of the best two experts of a group.
        raise refuse(
            "n_group", groups, f"a divisor of n_routed_experts={experts} with at least 2 experts a group"
        )
    if not 1 <= config.topk_groups <= groups:
        raise refuse("topk_group", config.topk_groups, f"1 to n_group={groups}")
    reachable = config.topk_groups * (experts // groups)
    if not 1 <= config.num_experts_per_token <= reachable:
        raise refuse(
            "num_experts_per_tok",
            config.num_experts_per_token,
            f"1 to {reachable}, the experts of topk_group groups",
        )


def _check_indexer(config: Config) -> None:
    if config.index_kpool < 1:
        raise refuse("index_kpool", config.index_kpool, "at least 1")
    if config.index_topk < config.index_kpool or config.index_topk % config.index_kpool:
        raise refuse(
            "index_topk", config.index_topk, f"a positive multiple of index_kpool={config.index_kpool}"
        )
    first = next((kind for kind in config.indexer_kinds if kind is not None), "full")
    if first == "shared":
        raise refuse(
            "indexer_types",
            list(config.indexer_kinds),
            "the first sparse-attention layer must be 'full', there is no earlier selection to share",
        )
    for layer, (kind, indexer) in enumerate(zip(config.layer_kinds, config.indexer_kinds, strict=True)):
        if (kind == "mla") != (indexer is not None):
            raise refuse(
                f"indexer_types[{layer}]", indexer, "'full' or 'shared' on MLA layers, None on KDA layers"
            )


def _check_values(config: Config) -> None:
    if config.gate_lower_bound is not None and not (
        math.isfinite(config.gate_lower_bound) and config.gate_lower_bound <= 0
    ):
        raise refuse(
            "gate_lower_bound", config.gate_lower_bound, "null, or a finite number not above 0 (log decay)"
        )
    if config.conv_kernel < 2:
        raise refuse("short_conv_kernel_size", config.conv_kernel, "at least 2 taps")
    for token in config.eos_token_ids:
        if not 0 <= token < config.vocab_size:
            raise refuse("eos_token_id", token, f"0 to vocab_size-1={config.vocab_size - 1}")
    if config.pad_token_id is not None and not 0 <= config.pad_token_id < config.vocab_size:
        raise refuse("pad_token_id", config.pad_token_id, f"0 to vocab_size-1={config.vocab_size - 1}")
