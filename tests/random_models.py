"""Small random models in which every part matters: no parameter at a neutral value."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp

from glm_jax.config import Config, load_config
from glm_jax.params import Params, init, named_leaves

SMALL: dict[str, Any] = {
    "model_type": "glm5_next_text",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 16,
    "index_kpool": 4,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "layer_types": [
        "linear_attention",
        "indexed_attention",
        "linear_attention",
        "indexed_attention",
        "linear_attention",
    ],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
    # the second MLA layer reuses the first one's selection across a KDA layer
    "indexer_types": ["full", "full", "full", "shared", "full"],
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 4096,
    "eos_token_id": [1],
}


def small_config(**changes: Any) -> Config:
    """Two MLA layers (one shared indexer), three KDA layers, top 16 tokens, one MTP layer."""
    return load_config({**SMALL, **changes})


def random_params(config: Config, seed: int = 0, dtype: Any = "float32", spread: float = 0.3) -> Params:
    """`init` plus noise of standard deviation `spread` on every vector: norms, biases, gates, mHC bases."""
    key = jax.random.key(seed)
    params = init(config, key, dtype)
    noisy = []
    for path, leaf in named_leaves(params).items():
        if leaf.ndim == 1 or path.endswith("ape"):
            noise = jax.random.normal(jax.random.fold_in(key, zlib.crc32(path.encode()) ^ 1), leaf.shape)
            leaf = leaf + spread * noise.astype(leaf.dtype)
        noisy.append(leaf)
    return jax.tree.unflatten(jax.tree.structure(params), [jnp.asarray(leaf) for leaf in noisy])
