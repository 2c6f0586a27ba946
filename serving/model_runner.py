"""The device side of the engine: owns the cache and runs the two compiled steps.

Everything above it works on numpy arrays; everything below is jit. One thread may use it.
"""

from typing import Any, Protocol

import jax

from glm_jax import cache as caches
from glm_jax import steps
from glm_jax.config import Config
from glm_jax.params import Params
from glm_jax.sampling import Logprobs
from glm_jax.steps import DecodeBatch, PrefillBatch, StepOutput

_STATIC = ("config", "implementation", "top_logprobs")
_prefill = jax.jit(steps.prefill, static_argnames=_STATIC, donate_argnames="cache")
_decode = jax.jit(steps.decode, static_argnames=_STATIC, donate_argnames="cache")
_prompt_logprobs = jax.jit(steps.prompt_logprobs, static_argnames="top")
_write_sampler_row = jax.jit(caches.write_sampler_row, donate_argnames="cache")


class Runner(Protocol):
    """What the engine needs of a device. Steps are dispatched in order; an output is read when needed."""

    window: int

    def prefill(self, batch: PrefillBatch) -> StepOutput: ...

    def decode(self, batch: DecodeBatch) -> StepOutput: ...

    def prompt_logprobs(self, hidden: jax.Array, targets: Any) -> Logprobs: ...

    def write_sampler_row(self, row: int, tables: caches.SamplerTables) -> None: ...


class ModelRunner:
    """Runs a model's steps over a cache of its own."""

    def __init__(
        self,
        params: Params,
        config: Config,
        geometry: dict[str, Any],
        *,
        top_logprobs: int,
        implementation: str | None = None,
        fill: float = 0.0,
    ) -> None:
        """`geometry`: the sizes that `glm_jax.cache.create` takes; `fill`: what unused memory holds (tests
        use NaN); `top_logprobs`: most alternatives a request can ask for."""
        self._params = params
        self._static = {"config": config, "implementation": implementation, "top_logprobs": top_logprobs}
        self._top = top_logprobs
        self._cache = caches.create(config, fill=fill, **geometry)
        self.window = self._cache.window

    def prefill(self, batch: PrefillBatch) -> StepOutput:
        output, self._cache = _prefill(self._params, cache=self._cache, batch=batch, **self._static)
        return output

    def decode(self, batch: DecodeBatch) -> StepOutput:
        output, self._cache = _decode(self._params, cache=self._cache, batch=batch, **self._static)
        return output

    def prompt_logprobs(self, hidden: jax.Array, targets: Any) -> Logprobs:
        return _prompt_logprobs(self._params, hidden, targets, top=self._top)

    def write_sampler_row(self, row: int, tables: caches.SamplerTables) -> None:
        self._cache = _write_sampler_row(self._cache, row, tables)
