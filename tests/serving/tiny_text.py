"""A tiny configuration without weights, and a tokenizer of single bytes with a chat template, for engine
tests."""

import dataclasses
from types import SimpleNamespace
from typing import NamedTuple

import jax
import tokenizers

from glm_jax.chat import ChatTemplate
from glm_jax.config import Config, load_config
from glm_jax.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Every token is one byte; the special tokens come after the bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(backend, ChatTemplate(TEMPLATE))


TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.id_of("<|endoftext|>")
assert EOS is not None


def config(**changes: object) -> Config:
    """Small in every dimension, with both attention kinds; vocabulary: the bytes and the special tokens."""
    made = load_config(
        {
            "model_type": "glm5_next_text",
            "vocab_size": 300,
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["deepseek_sparse_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "num_attention_heads": 2,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 32,
            "index_kpool": 4,
            "linear_attn_config": {"num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4},
            "hc_mult": 2,
            "hc_sinkhorn_iters": 4,
            "max_position_embeddings": 512,
            "eos_token_id": [EOS],
        }
    )
    return dataclasses.replace(made, **changes)


class Weightless(NamedTuple):
    embed_tokens: jax.Array


def weightless_model(**changes: object) -> SimpleNamespace:
    """A model as the engine sees it, for runs on the fake runner: no weights beyond the one the plan looks
    at."""
    params = Weightless(jax.numpy.zeros((1, 1)))
    return SimpleNamespace(config=config(**changes), params=params, tokenizer=TOKENIZER, name="fake")
