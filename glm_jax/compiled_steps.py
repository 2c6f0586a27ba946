"""The engine's steps, compiled: plain jit on one device, one `shard_map` with explicit collectives on a mesh.

Everything of a step happens inside that single `shard_map` over axis `tp`: heads, MLP widths and the
vocabulary are split, latents, index keys and the residual streams are replicated (MODEL.md g). Inputs that
the host makes and outputs that it reads are replicated.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm_jax import cache as caches
from glm_jax import steps
from glm_jax.cache import Cache, RowState, SamplerTables
from glm_jax.config import Config
from glm_jax.params import Params
from glm_jax.sharding import TENSOR_AXIS, check_mesh, partition_specs
from pallas_kernels.kda import KdaRecords


class CompiledSteps(NamedTuple):
    """Jitted functions; those that take a cache consume it."""

    prefill: Callable[..., Any]  # (params, cache, batch) -> (StepOutput, Cache)
    decode: Callable[..., Any]  # (params, cache, batch) -> (StepOutput, Cache)
    logprobs: Callable[..., Any]  # (logits, tokens), both of a StepOutput -> Logprobs
    prompt_logprobs: Callable[..., Any]  # (params, hidden, targets) -> Logprobs
    write_sampler_row: Callable[..., Any]  # (cache, slot, tables) -> Cache


def mesh_of(params: Params) -> Mesh | None:
    """The mesh that parameters were placed on, None on a single device."""
    sharding = params.embed_tokens.sharding if hasattr(params.embed_tokens, "sharding") else None
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.mesh
    return None


def cache_specs(fp8: bool) -> Cache:
    """`PartitionSpec` of every cache leg: KDA heads and the vocabulary are split, the rest is replicated."""
    specs: Any = PartitionSpec  # the fields are declared as arrays
    whole = specs()
    heads = specs(None, None, None, TENSOR_AXIS)
    vocabulary = specs(None, TENSOR_AXIS)
    return Cache(
        latents=whole,
        latent_scales=whole if fp8 else None,
        pooled=whole,
        ring=whole,
        kda_state=specs(None, None, TENSOR_AXIS),
        conv=specs(None, None, None, None, TENSOR_AXIS),
        records=KdaRecords(k=heads, v=heads, log_decay=heads, beta=heads),
        rows=RowState(position=whole, accepted=whole, tokens=whole),
        sampler=SamplerTables(counts=vocabulary, prompt=vocabulary, bias=vocabulary, ends=vocabulary),
    )


def create_cache(config: Config, mesh: Mesh | None, *, fill: float = 0.0, **geometry: Any) -> Cache:
    """`glm_jax.cache.create`, laid out over the mesh."""
    make = partial(caches.create, config, fill=fill, **geometry)
    if mesh is None:
        return make()
    fp8 = geometry.get("latent_dtype") == caches.FLOAT8
    shardings = jax.tree.map(partial(NamedSharding, mesh), cache_specs(fp8), is_leaf=_is_spec)
    return jax.jit(make, out_shardings=shardings)()


def compile_steps(
    params: Params, config: Config, *, fp8_latents: bool, top_logprobs: int, implementation: str | None = None
) -> CompiledSteps:
    """The steps for parameters as they are placed. ValueError if the model does not fit their mesh."""
    mesh = mesh_of(params)
    if mesh is None:
        return _single_device(config, top_logprobs, implementation)
    check_mesh(config, mesh)
    leaves, structure = jax.tree.flatten(partition_specs(config, params), is_leaf=_is_spec)
    return _on_mesh(config, mesh, structure, tuple(leaves), fp8_latents, top_logprobs, implementation)


@lru_cache
def _single_device(config: Config, top_logprobs: int, implementation: str | None) -> CompiledSteps:
    static: dict[str, Any] = {"config": config, "implementation": implementation}

    def prefill(params: Params, cache: Cache, batch: steps.PrefillBatch) -> tuple[steps.StepOutput, Cache]:
        return steps.prefill(params, cache=cache, batch=batch, **static)

    def decode(params: Params, cache: Cache, batch: steps.DecodeBatch) -> tuple[steps.StepOutput, Cache]:
        return steps.decode(params, cache=cache, batch=batch, **static)

    return CompiledSteps(
        prefill=jax.jit(prefill, donate_argnames="cache"),
        decode=jax.jit(decode, donate_argnames="cache"),
        logprobs=jax.jit(partial(steps.output_logprobs, top=top_logprobs)),
        prompt_logprobs=jax.jit(partial(steps.prompt_logprobs, top=top_logprobs)),
        write_sampler_row=jax.jit(caches.write_sampler_row, donate_argnames="cache"),
    )


@lru_cache
def _on_mesh(
    config: Config,
    mesh: Mesh,
    structure: Any,
    leaves: tuple[PartitionSpec, ...],
    fp8_latents: bool,
    top_logprobs: int,
    implementation: str | None,
) -> CompiledSteps:
    split_params = jax.tree.unflatten(structure, leaves)
    split_cache = cache_specs(fp8_latents)
    whole = PartitionSpec()
    step: dict[str, Any] = {
        "config": config,
        "axis": TENSOR_AXIS,
        "implementation": implementation,
    }
    # replicated values are not tracked through Pallas calls, hence check_vma=False
    shard = partial(jax.shard_map, mesh=mesh, check_vma=False)

    def prefill(params: Params, cache: Cache, batch: steps.PrefillBatch) -> tuple[steps.StepOutput, Cache]:
        return steps.prefill(params, cache=cache, batch=batch, **step)

    def decode(params: Params, cache: Cache, batch: steps.DecodeBatch) -> tuple[steps.StepOutput, Cache]:
        return steps.decode(params, cache=cache, batch=batch, **step)

    in_specs = (split_params, split_cache, whole)
    split_logits = PartitionSpec(None, None, TENSOR_AXIS)
    shardings = jax.tree.map(partial(NamedSharding, mesh), split_cache, is_leaf=_is_spec)
    return CompiledSteps(
        prefill=jax.jit(
            shard(prefill, in_specs=in_specs, out_specs=(_output_specs(split_logits, whole), split_cache)),
            donate_argnums=1,
        ),
        decode=jax.jit(
            shard(decode, in_specs=in_specs, out_specs=(_output_specs(split_logits, None), split_cache)),
            donate_argnums=1,
        ),
        logprobs=jax.jit(
            shard(
                partial(steps.output_logprobs, top=top_logprobs, axis=TENSOR_AXIS),
                in_specs=(split_logits, whole),
                out_specs=whole,
            )
        ),
        prompt_logprobs=jax.jit(
            shard(
                partial(steps.prompt_logprobs, top=top_logprobs, axis=TENSOR_AXIS),
                in_specs=(split_params, whole, whole),
                out_specs=whole,
            )
        ),
        write_sampler_row=jax.jit(caches.write_sampler_row, donate_argnames="cache", out_shardings=shardings),
    )


def _output_specs(logits: PartitionSpec, hidden: PartitionSpec | None) -> steps.StepOutput:
    """`PartitionSpec` of a step's outputs: replicated but for the logits."""
    whole: Any = PartitionSpec()  # the fields are declared as arrays
    split: Any = logits
    kept: Any = hidden
    return steps.StepOutput(
        tokens=whole, counts=whole, starts=whole, drafts=whole, healthy=whole, logits=split, hidden=kept
    )


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
