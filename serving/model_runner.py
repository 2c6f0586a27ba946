"""The device side of the engine: owns the cache and runs the two compiled steps.

Everything above it works on numpy arrays; everything below is jit. One thread may use it.
"""

from typing import Protocol

import jax

from glm_jax import cache as caches
from glm_jax import steps
from glm_jax.config import Config
from glm_jax.params import Params
from glm_jax.steps import DecodeBatch, PrefillBatch, StepOutput

_prefill = jax.jit(steps.prefill, static_argnames=("config", "implementation"), donate_argnames="cache")
_decode = jax.jit(steps.decode, static_argnames=("config", "implementation"), donate_argnames="cache")


class Runner(Protocol):
    """What the engine needs of a device. Steps are dispatched in order; an output is read when it is
    needed."""

    window: int

    def prefill(self, batch: PrefillBatch) -> StepOutput: ...

    def decode(self, batch: DecodeBatch) -> StepOutput: ...


class ModelRunner:
    """Runs a model's steps over a cache of its own."""

    def __init__(
        self,
        params: Params,
        config: Config,
        geometry: dict[str, int],
        *,
        implementation: str | None = None,
        fill: float = 0.0,
    ) -> None:
        """`geometry`: the sizes that `glm_jax.cache.create` takes; `fill`: its content at start, NaN in
        tests."""
        self._params = params
        self._config = config
        self._implementation = implementation
        self._cache = caches.create(config, **geometry, dtype=params.embed_tokens.dtype, fill=fill)
        self.window = self._cache.window

    def prefill(self, batch: PrefillBatch) -> StepOutput:
        output, self._cache = _prefill(
            self._params,
            config=self._config,
            cache=self._cache,
            batch=batch,
            implementation=self._implementation,
        )
        return output

    def decode(self, batch: DecodeBatch) -> StepOutput:
        output, self._cache = _decode(
            self._params,
            config=self._config,
            cache=self._cache,
            batch=batch,
            implementation=self._implementation,
        )
        return output
