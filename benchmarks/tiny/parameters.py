"""Parameters of the training forward: a flat dict of stacked float32 arrays, [in, out] as they multiply."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.tiny.shape import Shape

Params = dict[str, jax.Array]


def shapes(s: Shape) -> dict[str, tuple[int, ...]]:
    """Name -> shape. Leading axes: layers, KDA layers, or MLA layers with the MTP layer's last.

    The MoE stacks have num_layers + 1 entries: entry 0 is never used (layer 0 is dense), the last is the MTP
    layer's.
    """
    d, n = s.hidden_size, s.hc_streams
    kda, mla = 3 * s.groups, s.groups + 1
    inner = s.kda_heads * s.kda_head_dim
    hc = (2 + n) * n
    moe = s.num_layers + 1
    return {
        "embed": (s.vocab_size, d),
        "head": (s.vocab_size, d),
        "norm": (d,),
        "hc.fn": (s.num_layers, 2, hc, n * d),
        "hc.base": (s.num_layers, 2, hc),
        "hc.scale": (s.num_layers, 2, 3),
        "layer_norm": (s.num_layers, 2, d),
        "kda.q": (kda, d, inner),
        "kda.k": (kda, d, inner),
        "kda.v": (kda, d, inner),
        "kda.conv": (kda, s.conv_kernel, 3 * inner),
        "kda.f_a": (kda, d, s.kda_head_dim),
        "kda.f_b": (kda, s.kda_head_dim, inner),
        "kda.g_a": (kda, d, s.kda_head_dim),
        "kda.g_b": (kda, s.kda_head_dim, inner),
        "kda.beta": (kda, d, s.kda_heads),
        "kda.A_log": (kda, s.kda_heads),
        "kda.dt_bias": (kda, inner),
        "kda.o_norm": (kda, s.kda_head_dim),
        "kda.o": (kda, inner, d),
        "mla.q_a": (mla, d, s.q_lora_rank),
        "mla.q_norm": (mla, s.q_lora_rank),
        "mla.q_b": (mla, s.q_lora_rank, s.num_heads * s.qk_head_dim),
        "mla.kv_a": (mla, d, s.kv_lora_rank),
        "mla.kv_norm": (mla, s.kv_lora_rank),
        "mla.kv_b": (mla, s.kv_lora_rank, s.num_heads * (s.qk_head_dim + s.v_head_dim)),
        "mla.o": (mla, s.num_heads * s.v_head_dim, d),
        "index.q": (mla, s.q_lora_rank, s.index_heads * s.index_head_dim),
        "index.k": (mla, d, s.index_head_dim),
        "index.k_norm": (mla, s.index_head_dim),
        "index.k_bias": (mla, s.index_head_dim),
        "index.weights": (mla, d, s.index_heads),
        "index.ape": (mla, s.index_kpool, s.index_head_dim),
        "index.gate": (mla, d, s.index_head_dim),
        "dense.gate": (d, s.dense_width),
        "dense.up": (d, s.dense_width),
        "dense.down": (s.dense_width, d),
        "moe.router": (moe, d, s.num_experts),
        "moe.bias": (moe, s.num_experts),
        "moe.gate": (moe, s.num_experts, d, s.expert_width),
        "moe.up": (moe, s.num_experts, d, s.expert_width),
        "moe.down": (moe, s.num_experts, s.expert_width, d),
        "shared.gate": (moe, d, s.expert_width),
        "shared.up": (moe, d, s.expert_width),
        "shared.down": (moe, s.expert_width, d),
        "mtp.e_norm": (d,),
        "mtp.h_norm": (d,),
        "mtp.eh": (2 * d, d),
        "mtp.norm": (d,),
        "mtp.layer_norm": (2, d),
    }


def count(s: Shape) -> int:
    """Parameters that the checkpoint holds."""
    sizes = {name: math.prod(shape) for name, shape in shapes(s).items()}
    unused = sum(
        size // (s.num_layers + 1) for name, size in sizes.items() if name.startswith(("moe.", "shared."))
    )
    return sum(sizes.values()) - unused


def initialise(s: Shape, seed: int) -> Params:
    """Norms 1, streams kept apart (mixing near the identity), slow forget gates, small output projections."""
    r = np.random.default_rng(seed)
    return {name: jnp.asarray(_initial(name, shape, r, s), jnp.float32) for name, shape in shapes(s).items()}


def _initial(name: str, shape: tuple[int, ...], r: np.random.Generator, s: Shape) -> np.ndarray:
    if name.endswith("norm"):
        return np.ones(shape)
    if name in ("index.k_bias", "index.ape", "index.gate", "moe.bias", "kda.A_log"):
        return np.zeros(shape)
    noise = r.standard_normal(shape)
    if name == "hc.base":
        n = s.hc_streams
        mixing = np.broadcast_to(3.0 * np.eye(n).reshape(-1), (*shape[:-1], n * n))
        gates = 0.3 * noise[..., : 2 * n] + np.repeat([-1.0, 0.0], n)
        return np.concatenate([gates, mixing], -1)
    if name == "hc.scale":
        return np.full(shape, 0.5)
    if name == "kda.dt_bias":  # inverse softplus of 1e-3 .. 1e-1: as in Mamba, forgetting starts slow
        step = np.exp(r.uniform(math.log(1e-3), math.log(1e-1), shape))
        return step + np.log(-np.expm1(-step))
    if name == "kda.conv":  # mostly the current token
        return 0.1 * noise + 0.7 * (np.arange(s.conv_kernel) == s.conv_kernel - 1)[:, None]
    if name == "embed":
        return 0.5 * noise
    if name in ("head", "hc.fn", "moe.router"):
        return 0.02 * noise
    scale = 0.3 if name in ("kda.o", "mla.o", "dense.down", "moe.down", "shared.down") else 1.0
    return scale * noise / math.sqrt(shape[-2])
