"""GLM-5.3-Flash (`glm5_next`) in JAX: the model as pure functions over pytrees.

>>> import glm_jax
>>> model = glm_jax.load("tiny")
>>> logits = glm_jax.forward(model.params, model.config, tokens)
"""

from glm_jax import checkpoint, mtp, params
from glm_jax.config import Config, ConfigError, load_config
from glm_jax.errors import RequestError
from glm_jax.loading import Model, load
from glm_jax.offline import generate
from glm_jax.safetensors_file import CheckpointError
from glm_jax.sampling_params import SamplingParams
from glm_jax.saving import save
from glm_jax.teacher_forcing import ModelStates, forward, model_states

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "Model",
    "ModelStates",
    "RequestError",
    "SamplingParams",
    "checkpoint",
    "forward",
    "generate",
    "load",
    "load_config",
    "model_states",
    "mtp",
    "params",
    "save",
]
