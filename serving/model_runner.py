"""The device side of the engine: owns the cache and runs the two compiled steps.

Everything above it works on numpy arrays; everything below is jit. One thread may use it.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.cache import FLOAT8, SamplerTables
from glm_jax.compiled_steps import compile_steps, create_cache, mesh_of
from glm_jax.config import Config
from glm_jax.params import Params
from glm_jax.sampling import GrammarMask, Logprobs
from glm_jax.steps import DecodeBatch, PrefillBatch, StepOutput

# On an H200 the 12 programs of 8 layers took 101 s eight at a time; more would wait for Python's lock.
_MOST_AT_ONCE = 8


class Runner(Protocol):
    """What the engine needs of a device. Steps are dispatched in order; an output is read when needed."""

    window: int

    def compile(self, prefills: Sequence[PrefillBatch], decodes: Sequence[DecodeBatch]) -> list[float]: ...

    def prefill(self, batch: PrefillBatch) -> StepOutput: ...

    def decode(self, batch: DecodeBatch) -> StepOutput: ...

    def logprobs(self, output: StepOutput) -> Logprobs: ...

    def prompt_logprobs(self, hidden: jax.Array, targets: Any) -> Logprobs: ...

    def write_sampler_row(self, row: int, tables: SamplerTables) -> None: ...


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
        self._steps = compile_steps(
            params,
            config,
            fp8_latents=geometry["latent_dtype"] == FLOAT8,
            top_logprobs=top_logprobs,
            implementation=implementation,
        )
        self._cache = create_cache(config, mesh_of(params), fill=fill, **geometry)
        self.window = self._cache.window
        self._words = -(-config.vocab_size // 32)
        self._neutral: dict[tuple[int, int], GrammarMask] = {}

    def compile(self, prefills: Sequence[PrefillBatch], decodes: Sequence[DecodeBatch]) -> list[float]:
        """Compiles the steps for batches of these shapes, several at once; running one compiles nothing more.

        Returns the seconds that each took, beside the others.
        """
        calls = [(self._steps.prefill, self._with_mask(batch, 1)) for batch in prefills]
        calls += [(self._steps.decode, self._with_mask(batch, self.window)) for batch in decodes]

        def seconds(call: Any) -> float:
            step, batch = call
            begin = time.perf_counter()
            step.lower(self._params, self._cache, batch).compile()
            return time.perf_counter() - begin

        with ThreadPoolExecutor(min(_MOST_AT_ONCE, os.cpu_count() or 1)) as pool:
            return list(pool.map(seconds, calls))

    def prefill(self, batch: PrefillBatch) -> StepOutput:
        output, self._cache = self._steps.prefill(self._params, self._cache, self._with_mask(batch, 1))
        return _on_its_way(output)

    def decode(self, batch: DecodeBatch) -> StepOutput:
        batch = self._with_mask(batch, self.window)
        output, self._cache = self._steps.decode(self._params, self._cache, batch)
        return _on_its_way(output)

    def logprobs(self, output: StepOutput) -> Logprobs:
        return self._steps.logprobs(output.logits, output.tokens)

    def prompt_logprobs(self, hidden: jax.Array, targets: Any) -> Logprobs:
        return self._steps.prompt_logprobs(self._params, hidden, targets)

    def write_sampler_row(self, row: int, tables: SamplerTables) -> None:
        self._cache = self._steps.write_sampler_row(self._cache, row, tables)

    def _with_mask(self, batch: Any, window: int) -> Any:
        if batch.grammar is not None:
            return batch
        return replace(batch, grammar=self._unguided(batch.request_slots.shape[0], window))

    def _unguided(self, rows: int, window: int) -> GrammarMask:
        """A mask of all tokens, kept on the device, so that a step without guidance uploads none."""
        if (rows, window) not in self._neutral:
            words = jnp.full((rows, window, self._words), np.uint32(0xFFFFFFFF))
            self._neutral[rows, window] = GrammarMask(words, jnp.zeros((), bool))
        return self._neutral[rows, window]


def _on_its_way(output: StepOutput) -> StepOutput:
    """The same, what the host reads of it being copied as soon as it is computed."""
    for array in (output.counts, output.tokens, output.healthy):
        array.copy_to_host_async()
    return output
