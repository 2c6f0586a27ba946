"""Engine, scheduler and HTTP API over the model of `glm_jax`."""

from serving.engine import Engine
from serving.engine_config import EngineConfig
from serving.request import Request

__all__ = ["Engine", "EngineConfig", "Request"]
