"""The parameter tree: flax pytree dataclasses that keep the checkpoint's `[out, in]` orientation."""

import jax
from flax import struct

from glm_jax.quantization import Weight


@struct.dataclass
class HyperConnection:
    """Hyper-connection of n residual streams: rows of `fn` are pre n, post n, comb n*n row-major."""

    fn: jax.Array  # [n * (2 + n), n * D]
    base: jax.Array  # [n * (2 + n)] float32
    scale: jax.Array  # [3] float32


@struct.dataclass
class Kda:
    """Kimi delta attention of H heads of K channels."""

    qkv_proj: Weight  # [3, H * K, D]: q, k, v
    conv: jax.Array  # [3, H * K, taps], oldest tap first
    fg_a: Weight  # [2, K, D]: 0 the forget gate's down-projection, 1 the output gate's
    f_b: Weight  # [H * K, K]
    g_b: Weight  # [H * K, K]
    b_proj: Weight  # [H, D]
    A_log: jax.Array  # [H] float32
    dt_bias: jax.Array  # [H * K] float32
    o_norm: jax.Array  # [K]
    o_proj: Weight  # [D, H * K]


@struct.dataclass
class Indexer:
    """k-pool indexer of Hi heads of Di channels over pools of P tokens."""

    wq_b: Weight  # [Hi * Di, q_lora]
    wk: Weight  # [Di, D]
    k_norm_weight: jax.Array  # [Di]
    k_norm_bias: jax.Array  # [Di]
    weights_proj: Weight  # [Hi, D]
    ape: jax.Array  # [P, Di]
    gate: Weight  # [Di, D]


@struct.dataclass
class Mla:
    """Latent attention without rotary embedding; `k_b` and `v_b` are the per-head halves of kv_b_proj."""

    q_a_proj: Weight  # [q_lora, D]
    q_a_bias: jax.Array | None  # [q_lora]
    q_a_layernorm: jax.Array  # [q_lora]
    q_b_proj: Weight  # [H * qk, q_lora]
    kv_a_proj: Weight  # [L, D]
    kv_a_bias: jax.Array | None  # [L]
    kv_a_layernorm: jax.Array  # [L]
    k_b: jax.Array  # [H, qk, L]
    v_b: jax.Array  # [H, v, L]
    o_proj: Weight  # [D, H * v]
    o_bias: jax.Array | None  # [D]
    indexer: Indexer | None  # None on layers that share the selection of the last full one


@struct.dataclass
class DenseMlp:
    """Clamped SwiGLU MLP of width I."""

    gate_up: Weight  # [2, I, D]: gate, up
    down: Weight  # [D, I]


@struct.dataclass
class Moe:
    """E routed experts of width I, and the shared ones as a single MLP."""

    router: jax.Array  # [E, D]
    router_bias: jax.Array  # [E] float32, used for the selection only
    gate_up: Weight  # [E, 2, I, D]
    down: Weight  # [E, D, I]
    shared: DenseMlp


@struct.dataclass
class Layer:
    """A main layer: attention and MLP, each inside its hyper-connection."""

    input_layernorm: jax.Array  # [D]
    post_attention_layernorm: jax.Array  # [D]
    attention_hc: HyperConnection
    mlp_hc: HyperConnection
    attention: Kda | Mla
    mlp: DenseMlp | Moe


@struct.dataclass
class MtpLayer:
    """The multi-token-prediction layer: single stream, no hyper-connections."""

    enorm: jax.Array  # [D]
    hnorm: jax.Array  # [D]
    eh_proj: Weight  # [D, 2 * D]: embedding half first
    input_layernorm: jax.Array  # [D]
    post_attention_layernorm: jax.Array  # [D]
    attention: Mla
    mlp: Moe
    norm: jax.Array  # [D], shared_head.norm


@struct.dataclass
class Params:
    """All weights of the text model; the MTP layer uses the same embedding and head."""

    embed_tokens: jax.Array  # [vocab, D]
    layers: tuple[Layer, ...]
    norm: jax.Array  # [D]
    lm_head: jax.Array  # [vocab, D]
    mtp: MtpLayer | None
