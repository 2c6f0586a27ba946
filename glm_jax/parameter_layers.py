"""`abstract`: the parameter tree of a configuration with a `ParameterSpec` at every leaf.

Names and shapes are those of the released checkpoint (MODEL.md b). The functions that make one leaf return
`Any`: the tree's fields are typed as arrays, which is what every other tree has there.
"""

from typing import Any

from glm_jax.config import Config
from glm_jax.parameter_spec import DiskDtype, Initializer, ParameterSpec, Source
from glm_jax.parameter_tree import (
    DenseMlp,
    HyperConnection,
    Indexer,
    Kda,
    Layer,
    Mla,
    Moe,
    MtpLayer,
    Params,
)

TEXT_PREFIX = "model.language_model."


def abstract(config: Config) -> Params:
    """The tree `Params` with a `ParameterSpec` for every parameter, dtypes as in the released layout."""
    vocabulary = (config.vocab_size, config.hidden_size)
    layers = tuple(_layer(config, index) for index in range(config.num_layers))
    return Params(
        embed_tokens=_plain(f"{TEXT_PREFIX}embed_tokens.weight", vocabulary, ("vocab", "embed"), "embedding"),
        layers=layers,
        norm=_norm(f"{TEXT_PREFIX}norm.weight", config.hidden_size),
        lm_head=_plain("lm_head.weight", vocabulary, ("vocab", "embed")),
        mtp=_mtp(config) if config.num_mtp_layers else None,
    )


def _plain(
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    initializer: Initializer = "normal",
    *,
    dtype: DiskDtype = "BF16",
) -> Any:
    """A leaf that is exactly one disk tensor."""
    island = dtype == "F32"
    return ParameterSpec(shape, dtype, axes, (Source(name, shape),), initializer, float32_island=island)


def _norm(name: str, size: int, axis: str = "embed") -> Any:
    return _plain(name, (size,), (axis,), "ones")


def _linear(
    config: Config, name: str, shape: tuple[int, int], axes: tuple[str, str], *, block_scaled: bool = False
) -> Any:
    """A projection `[out, in]`, fp8 in a quantised checkpoint where `block_scaled`."""
    return _projection(config, shape, axes, (Source(f"{name}.weight", shape),), block_scaled=block_scaled)


def _projection(
    config: Config,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    sources: tuple[Source, ...],
    *,
    block_scaled: bool = False,
) -> Any:
    dtype: DiskDtype = "F8_E4M3" if block_scaled and config.quantization else "BF16"
    return ParameterSpec(shape, dtype, axes, sources, block_scaled=block_scaled)


def _stacked(
    names: tuple[str, ...], shape: tuple[int, ...], disk_shape: tuple[int, ...] | None = None
) -> tuple[Source, ...]:
    """Sources of a leaf `[len(names), *shape]`, each tensor of `disk_shape` (default `shape`)."""
    return tuple(
        Source(name, disk_shape or shape, leaf_index=(position,), view=shape)
        for position, name in enumerate(names)
    )


def _layer(config: Config, index: int) -> Layer:
    prefix = f"{TEXT_PREFIX}layers.{index}."
    kda = config.layer_kinds[index] == "kda"
    attention = f"{prefix}self_attn."
    return Layer(
        input_layernorm=_norm(f"{prefix}input_layernorm.weight", config.hidden_size),
        post_attention_layernorm=_norm(f"{prefix}post_attention_layernorm.weight", config.hidden_size),
        attention_hc=_hyper_connection(config, f"{prefix}hc_attn_"),
        mlp_hc=_hyper_connection(config, f"{prefix}hc_ffn_"),
        attention=_kda(config, attention)
        if kda
        else _mla(config, attention, own_indexer=config.indexer_kinds[index] == "full"),
        mlp=_dense_mlp(config, f"{prefix}mlp.", config.intermediate_size)
        if config.mlp_kinds[index] == "dense"
        else _moe(config, f"{prefix}mlp."),
    )


def _hyper_connection(config: Config, prefix: str) -> HyperConnection:
    streams = config.hc_streams
    mixes = streams * (2 + streams)
    width = streams * config.hidden_size
    return HyperConnection(
        fn=_plain(f"{prefix}fn", (mixes, width), ("hyper", "streams_embed")),
        base=_plain(f"{prefix}base", (mixes,), ("hyper",), "zeros", dtype="F32"),
        scale=_plain(f"{prefix}scale", (3,), ("hyper",), "ones", dtype="F32"),
    )


def _kda(config: Config, prefix: str) -> Kda:
    hidden, heads, dim, taps = config.hidden_size, config.kda_heads, config.kda_head_dim, config.conv_kernel
    channels = config.kda_channels
    rank_axes, up_axes = ("kda_dim", "embed"), ("kda_channels", "kda_dim")
    return Kda(
        qkv_proj=_projection(
            config,
            (3, channels, hidden),
            ("stack", "kda_channels", "embed"),
            _stacked(tuple(f"{prefix}{part}_proj.weight" for part in "qkv"), (channels, hidden)),
        ),
        conv=_conv(prefix, channels, taps),
        fg_a=_projection(
            config,
            (2, dim, hidden),
            ("stack", *rank_axes),
            _stacked((f"{prefix}f_a_proj.weight", f"{prefix}g_a_proj.weight"), (dim, hidden)),
        ),
        f_b=_linear(config, f"{prefix}f_b_proj", (channels, dim), up_axes),
        g_b=_linear(config, f"{prefix}g_b_proj", (channels, dim), up_axes),
        b_proj=_linear(config, f"{prefix}b_proj", (heads, hidden), ("kda_heads", "embed")),
        A_log=_plain(f"{prefix}A_log", (heads,), ("kda_heads",), "decay_rate", dtype="F32"),
        dt_bias=_plain(f"{prefix}dt_bias", (channels,), ("kda_channels",), "decay_time", dtype="F32"),
        o_norm=_norm(f"{prefix}o_norm.weight", dim, "kda_dim"),
        o_proj=_linear(config, f"{prefix}o_proj", (hidden, channels), ("embed", "kda_channels")),
    )


def _conv(prefix: str, channels: int, taps: int) -> Any:
    """The three depthwise convolutions, without the disk's axis of one input channel a group."""
    names = tuple(f"{prefix}{part}_conv1d.weight" for part in "qkv")
    sources = _stacked(names, (channels, taps), (channels, 1, taps))
    return ParameterSpec((3, channels, taps), "BF16", ("stack", "kda_channels", "taps"), sources)


def _mla(config: Config, prefix: str, *, own_indexer: bool) -> Mla:
    hidden, heads = config.hidden_size, config.num_heads
    q_rank, rank, qk, v = config.q_lora_rank, config.kv_lora_rank, config.qk_head_dim, config.v_head_dim
    fused, view = (heads * (qk + v), rank), (heads, qk + v, rank)
    kv_b = f"{prefix}kv_b_proj.weight"

    def bias(name: str, size: int, axis: str) -> Any:
        if not config.attention_bias:
            return None
        return _plain(f"{prefix}{name}.bias", (size,), (axis,), "zeros")

    def scaled(name: str, shape: tuple[int, int], axes: tuple[str, str]) -> Any:
        return _linear(config, prefix + name, shape, axes, block_scaled=True)

    def half(size: int, part: slice) -> Any:
        source = Source(kv_b, fused, view=view, disk_index=(slice(None), part))
        return ParameterSpec((heads, size, rank), "BF16", ("mla_heads", "mla_dim", "kv_lora"), (source,))

    return Mla(
        q_a_proj=scaled("q_a_proj", (q_rank, hidden), ("q_lora", "embed")),
        q_a_bias=bias("q_a_proj", q_rank, "q_lora"),
        q_a_layernorm=_norm(f"{prefix}q_a_layernorm.weight", q_rank, "q_lora"),
        q_b_proj=scaled("q_b_proj", (heads * qk, q_rank), ("mla_query", "q_lora")),
        kv_a_proj=scaled("kv_a_proj_with_mqa", (rank, hidden), ("kv_lora", "embed")),
        kv_a_bias=bias("kv_a_proj_with_mqa", rank, "kv_lora"),
        kv_a_layernorm=_norm(f"{prefix}kv_a_layernorm.weight", rank, "kv_lora"),
        k_b=half(qk, slice(0, qk)),
        v_b=half(v, slice(qk, qk + v)),
        o_proj=scaled("o_proj", (hidden, heads * v), ("embed", "mla_value")),
        o_bias=bias("o_proj", hidden, "embed"),
        indexer=_indexer(config, f"{prefix}indexer.") if own_indexer else None,
    )


def _indexer(config: Config, prefix: str) -> Indexer:
    hidden, heads, dim = config.hidden_size, config.index_heads, config.index_head_dim
    return Indexer(
        wq_b=_linear(config, f"{prefix}wq_b", (heads * dim, config.q_lora_rank), ("index_query", "q_lora")),
        wk=_linear(config, f"{prefix}wk", (dim, hidden), ("index_dim", "embed")),
        k_norm_weight=_norm(f"{prefix}k_norm.weight", dim, "index_dim"),
        k_norm_bias=_plain(f"{prefix}k_norm.bias", (dim,), ("index_dim",), "zeros"),
        weights_proj=_linear(config, f"{prefix}weights_proj", (heads, hidden), ("index_heads", "embed")),
        ape=_plain(f"{prefix}index_kpool_compress_ape", (config.index_kpool, dim), ("kpool", "index_dim")),
        gate=_plain(f"{prefix}index_kpool_compress_gate", (dim, hidden), ("index_dim", "embed")),
    )


def _dense_mlp(config: Config, prefix: str, width: int) -> DenseMlp:
    hidden = config.hidden_size
    gate_up = _stacked((f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"), (width, hidden))
    return DenseMlp(
        gate_up=_projection(
            config, (2, width, hidden), ("stack", "mlp", "embed"), gate_up, block_scaled=True
        ),
        down=_linear(config, f"{prefix}down_proj", (hidden, width), ("embed", "mlp"), block_scaled=True),
    )


def _moe(config: Config, prefix: str) -> Moe:
    hidden, experts, width = config.hidden_size, config.num_experts, config.moe_intermediate_size
    gate_up = tuple(
        Source(f"{prefix}experts.{expert}.{part}_proj.weight", (width, hidden), leaf_index=(expert, half))
        for expert in range(experts)
        for half, part in enumerate(("gate", "up"))
    )
    down = _stacked(
        tuple(f"{prefix}experts.{expert}.down_proj.weight" for expert in range(experts)), (hidden, width)
    )
    return Moe(
        router=_plain(f"{prefix}gate.weight", (experts, hidden), ("router", "embed")),
        router_bias=_plain(
            f"{prefix}gate.e_score_correction_bias", (experts,), ("router",), "zeros", dtype="F32"
        ),
        gate_up=_projection(
            config,
            (experts, 2, width, hidden),
            ("experts", "stack", "expert_mlp", "embed"),
            gate_up,
            block_scaled=True,
        ),
        down=_projection(
            config, (experts, hidden, width), ("experts", "embed", "expert_mlp"), down, block_scaled=True
        ),
        shared=_dense_mlp(config, f"{prefix}shared_experts.", width * config.num_shared_experts),
    )


def _mtp(config: Config) -> MtpLayer:
    """The layer after the last main one: own attention, indexer and experts, shared embedding and head."""
    hidden = config.hidden_size
    prefix = f"{TEXT_PREFIX}layers.{config.num_layers}."
    return MtpLayer(
        enorm=_norm(f"{prefix}enorm.weight", hidden),
        hnorm=_norm(f"{prefix}hnorm.weight", hidden),
        eh_proj=_linear(config, f"{prefix}eh_proj", (hidden, 2 * hidden), ("embed", "mtp_input")),
        input_layernorm=_norm(f"{prefix}input_layernorm.weight", hidden),
        post_attention_layernorm=_norm(f"{prefix}post_attention_layernorm.weight", hidden),
        attention=_mla(config, f"{prefix}self_attn.", own_indexer=True),
        mlp=_moe(config, f"{prefix}mlp."),
        norm=_norm(f"{prefix}shared_head.norm.weight", hidden),
    )
