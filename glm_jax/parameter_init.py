"""Random parameters of a configuration, for tests and training."""

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from glm_jax.config import Config
from glm_jax.parameter_layers import abstract
from glm_jax.parameter_spec import ParameterSpec, is_spec, named_leaves
from glm_jax.parameter_tree import Params


def init(config: Config, key: jax.Array, dtype: Any = "float32") -> Params:
    """Draws random parameters in `dtype`; float32 islands stay at least float32, nothing is quantised.

    Projections have variance 1 / inputs, norms are 1, biases 0. The forget gate starts with long memory, as
    published for this attention: decay times log-uniform in 0.001 to 0.1, rate 1 (bounded gate) or
    uniform in 1 to 16 (softplus gate).

    Args:
        config: the model.
        key: a `jax.random` key; a leaf's values depend on the key and the leaf's path alone.
        dtype: of every leaf that is not a float32 island.
    """
    specs = abstract(config)
    leaves = []
    for path, spec in named_leaves(specs, is_spec).items():
        leaf_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
        leaf_dtype = jnp.promote_types(dtype, jnp.float32) if spec.float32_island else jnp.dtype(dtype)
        leaves.append(_draw(config, spec, leaf_key).astype(leaf_dtype))
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), leaves)


def _draw(config: Config, spec: ParameterSpec, key: jax.Array) -> jax.Array:
    match spec.initializer:
        case "ones":
            return jnp.ones(spec.shape)
        case "zeros":
            return jnp.zeros(spec.shape)
        case "embedding":
            return jax.random.normal(key, spec.shape)
        case "decay_rate":
            if config.gate_lower_bound is not None:
                return jnp.zeros(spec.shape)
            return jnp.log(jax.random.uniform(key, spec.shape, minval=1.0, maxval=16.0))
        case "decay_time":
            time = jnp.exp(jax.random.uniform(key, spec.shape, minval=math.log(1e-3), maxval=math.log(1e-1)))
            return time + jnp.log(-jnp.expm1(-time))  # inverse softplus
        case "normal":
            return jax.random.normal(key, spec.shape) * spec.shape[-1] ** -0.5
