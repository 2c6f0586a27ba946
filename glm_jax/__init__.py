"""GLM-5.3-Flash (`glm5_next`) in JAX: the model as pure functions over pytrees.

>>> import glm_jax
>>> model = glm_jax.load("tiny")
>>> logits = glm_jax.forward(model.params, model.config, tokens)
"""

from glm_jax import params
from glm_jax.config import Config, ConfigError, load_config
from glm_jax.loading import Model, load
from glm_jax.sampling_params import SamplingParams
from glm_jax.teacher_forcing import ModelStates, forward, model_states

__all__ = [
    "Config",
    "ConfigError",
    "Model",
    "ModelStates",
    "SamplingParams",
    "forward",
    "load",
    "load_config",
    "model_states",
    "params",
]
