"""Random parameters of a configuration, for tests and training."""

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.config import Config
from glm_jax.parameter_layers import abstract
from glm_jax.parameter_spec import ParameterSpec, is_spec, named_leaves
from glm_jax.parameter_tree import Params


def init(config: Config, key: jax.Array, dtype: Any = "float32") -> Params:
    """Draws random parameters in `dtype`; float32 islands stay at least float32, nothing is quantised.

    Projections have variance 1 / inputs, norms are 1, biases 0. The forget gate starts with long memory, as
    published for this attention: decay times log-uniform in 0.001 to 0.1, rate 1 (bounded gate) or uniform in
    1 to 16 (softplus gate).

    Args:
        config: the model.
        key: a concrete `jax.random` key; a leaf's values depend on the key and the leaf's path alone.
        dtype: of every leaf that is not a float32 island.
    """
    specs = abstract(config)
    seed = np.asarray(jax.random.key_data(key)).ravel().tolist()
    leaves = []
    for path, spec in named_leaves(specs, is_spec).items():
        # numpy, because jax.random would compile one program for each of the many shapes
        generator = np.random.default_rng([*seed, zlib.crc32(path.encode())])
        leaf_dtype = jnp.promote_types(dtype, jnp.float32) if spec.float32_island else jnp.dtype(dtype)
        leaves.append(jnp.asarray(_draw(config, spec, generator).astype(leaf_dtype)))
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), leaves)


def _draw(config: Config, spec: ParameterSpec, generator: np.random.Generator) -> np.ndarray:
    match spec.initializer:
        case "ones":
            return np.ones(spec.shape)
        case "zeros":
            return np.zeros(spec.shape)
        case "embedding":
            return generator.standard_normal(spec.shape, np.float32)
        case "decay_rate":
            if config.gate_lower_bound is not None:
                return np.zeros(spec.shape)
            return np.log(generator.uniform(1.0, 16.0, spec.shape))
        case "decay_time":
            time = np.exp(generator.uniform(math.log(1e-3), math.log(1e-1), spec.shape))
            return time + np.log(-np.expm1(-time))  # inverse softplus
        case "normal":
            return generator.standard_normal(spec.shape, np.float32) * spec.shape[-1] ** -0.5
