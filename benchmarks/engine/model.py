"""Random models of released widths, made on the device: block-scaled fp8 where the release is."""

import dataclasses
import math
import pathlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from glm_jax.config import Config, load_config
from glm_jax.params import Params, abstract, is_spec
from glm_jax.quantization import BlockScaled

RELEASED = pathlib.Path(__file__).parents[2] / "tests" / "fixtures" / "glm5_3_flash_config.json"
ROWS_AT_ONCE = 2**26  # random elements drawn at once: 288 experts at once would need 20 GB of float32


def cut_config(layers: int, *, tiny: bool = False) -> Config:
    """The first `layers` layers of the released model and its MTP layer (`tiny`: shrunk widths)."""
    config = load_config(RELEASED)
    config = dataclasses.replace(
        config,
        num_layers=layers,
        layer_kinds=config.layer_kinds[:layers],
        mlp_kinds=config.mlp_kinds[:layers],
        indexer_kinds=config.indexer_kinds[:layers],
        vision=None,
        max_position_embeddings=65536,
        eos_token_ids=(),
        pad_token_id=None,
    )
    if not tiny:
        return config
    return dataclasses.replace(
        config, vocab_size=256, hidden_size=128, intermediate_size=128, moe_intermediate_size=128,
        num_experts=8, num_experts_per_token=2, num_heads=2, q_lora_rank=128, kv_lora_rank=128,
        qk_head_dim=64, v_head_dim=64, index_heads=2, index_head_dim=32, index_topk=64, kda_heads=2,
        kda_head_dim=64,
    )  # fmt: skip


def random_model(config: Config) -> Any:
    """What the engine reads of a model: `config`, `params` and no tokenizer."""
    leaves, structure = jax.tree.flatten(abstract(config), is_leaf=is_spec)
    # XLA's own generator: several times as fast as threefry, and only this device need know the numbers
    keys = jax.random.split(jax.random.key(0, impl="unsafe_rbg"), len(leaves))
    made = [_leaf(spec, key) for spec, key in zip(leaves, keys, strict=True)]
    params: Params = jax.tree.unflatten(structure, made)
    return SimpleNamespace(config=config, params=params, tokenizer=None)


def model_shapes(config: Config) -> Params:
    """The parameters of `random_model` as shapes without values."""

    def shapes(spec: Any) -> Any:
        return jax.eval_shape(lambda: _leaf(spec, jax.random.key(0)))

    made: Params = jax.tree.map(shapes, abstract(config), is_leaf=is_spec)
    return made


def _leaf(spec: Any, key: jax.Array) -> Any:
    if spec.initializer == "ones":
        return jnp.ones(spec.shape, jnp.bfloat16)
    dtype = jnp.float32 if spec.float32_island else jnp.bfloat16
    if not spec.block_scaled:
        return _normal(key, spec.shape, dtype, spec.shape[-1] ** -0.5)
    values = _uniform8(key, spec.shape)
    blocks = (*spec.shape[:-2], *(-(-n // 128) for n in spec.shape[-2:]))
    return BlockScaled(values, jnp.full(blocks, spec.shape[-1] ** -0.5 / 73.9, jnp.float32))


def _uniform8(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Integers of -128 to 127 rounded to float8: standard deviation 73.9, and one random byte each.

    Normal numbers took 35 s on an H200 for the 15e9 weights of one MoE layer and MTP's.
    """
    size = math.prod(shape)
    lead = shape[0] if len(shape) > 2 and size > ROWS_AT_ONCE else 1

    @jax.jit
    def draw(keys: jax.Array) -> jax.Array:
        def one(key: jax.Array) -> jax.Array:
            bits = jax.random.bits(key, (size // lead,), jnp.uint8)
            return jax.lax.bitcast_convert_type(bits, jnp.int8).astype(jnp.bfloat16).astype(jnp.float8_e4m3fn)

        return jax.lax.map(one, keys)

    return draw(jax.random.split(key, lead)).reshape(shape)


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any, scale: float) -> jax.Array:
    size = math.prod(shape)
    lead = shape[0] if len(shape) > 2 and size > ROWS_AT_ONCE else 1
    tail = (size // lead,)

    @jax.jit
    def draw(keys: jax.Array) -> jax.Array:
        return jax.lax.map(lambda k: (jax.random.normal(k, tail) * scale).astype(dtype), keys)

    return draw(jax.random.split(key, lead)).reshape(shape)
