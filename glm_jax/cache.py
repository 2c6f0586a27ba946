"""The cache: one donated pytree, one stacked array per leg, [layer, ...].

Two address spaces, both handed out by the host:
- blocks: a block id covers `block_size` consecutive tokens of a request in every MLA layer (the MTP layer is
  the last) and brings back latents and pooled index keys alike;
- slots: a state slot holds the KDA states and convolution history of all KDA layers at one position (running
  requests and prefix snapshots share the pool); a request slot holds what only a running request has.

Padding is written nowhere: its ids are -1, which every write maps past the end and drops.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from glm_jax.config import Config
from pallas_kernels.kda import KdaRecords

FLOAT8 = jnp.float8_e4m3fn
LATENT_SCALE_CHANNELS = 128


@struct.dataclass
class RowState:
    """What the device knows of a running request between steps, so that step n+1 never waits for step n."""

    position: jax.Array  # [request_slots] int32: absolute position of the next window's first token
    accepted: jax.Array  # [request_slots] int32: tokens of the last window that were committed
    tokens: jax.Array  # [request_slots, window] int32: the last sampled token, then its drafts


@struct.dataclass
class SamplerTables:
    """What logit processing keeps of a request that asks for it; other requests' rows are never read."""

    counts: jax.Array  # [request_slots, vocab] int32: how often each token was generated
    prompt: jax.Array  # [request_slots, vocab] bool: tokens of the prompt
    bias: jax.Array  # [request_slots, vocab] float32: logit bias, -inf for tokens that are not allowed
    ends: jax.Array  # [request_slots, vocab] bool: tokens that would end the answer


@struct.dataclass
class Cache:
    latents: jax.Array  # [mla_layers, blocks, block_size, kv_lora_rank] compute dtype or float8_e4m3fn
    latent_scales: jax.Array | None  # [mla_layers, blocks, block_size, kv_lora_rank / 128] float32, fp8 only
    pooled: jax.Array  # [mla_layers, blocks, block_size / kpool, index_head_dim] compute dtype
    ring: (
        jax.Array
    )  # [mla_layers, request_slots, ring_rows, 2, index_head_dim]: key and gate by position mod rows
    kda_state: jax.Array  # [kda_layers, state_slots, heads, dim, dim] at least float32
    conv: jax.Array  # [kda_layers, state_slots, taps - 1 + window, 3, heads * dim]: history, then last window
    records: (
        KdaRecords  # the last window's k, v, log_decay, beta: [kda_layers, request_slots, window, heads, ...]
    )
    rows: RowState
    sampler: SamplerTables

    @property
    def block_size(self) -> int:
        return self.latents.shape[2]

    @property
    def window(self) -> int:
        return self.rows.tokens.shape[1]


def ring_rows(kpool: int, drafts: int) -> int:
    """Rows of the tail ring: the open pool plus two windows, rounded up to a power of two.

    Two windows, because the first may be rejected entirely while the second is being written (MODEL.md d.3).
    """
    needed = kpool + 2 * (drafts + 1)
    return 1 << (needed - 1).bit_length()


def shapes(
    config: Config,
    *,
    num_blocks: int,
    block_size: int,
    num_state_slots: int,
    num_request_slots: int,
    drafts: int = 0,
    dtype: Any = jnp.bfloat16,
    latent_dtype: Any = None,
) -> Cache:
    """The cache as a pytree of `jax.ShapeDtypeStruct`, for memory plans and sharding.

    `drafts`: speculative tokens a step (0 to 7); `dtype`: compute dtype; `latent_dtype`: `dtype` unless
    float8_e4m3fn. ValueError when a block does not hold whole pools.
    """
    if block_size % config.index_kpool:
        raise ValueError(f"block_size {block_size} must be a multiple of index_kpool {config.index_kpool}")
    latent_dtype = dtype if latent_dtype is None else latent_dtype
    fp8 = latent_dtype == FLOAT8
    if fp8 and config.kv_lora_rank % LATENT_SCALE_CHANNELS:
        raise ValueError(
            f"fp8 latents need kv_lora_rank divisible by {LATENT_SCALE_CHANNELS}, got {config.kv_lora_rank}"
        )
    window = drafts + 1
    wide = jnp.promote_types(dtype, jnp.float32)
    mla = config.layer_kinds.count("mla") + config.num_mtp_layers
    kda = config.layer_kinds.count("kda")
    heads, dim = config.kda_heads, config.kda_head_dim
    array: Any = jax.ShapeDtypeStruct  # the fields are declared as arrays

    def per_window(*tail: int) -> Any:
        return array((kda, num_request_slots, window, heads, *tail), wide)

    rank = config.kv_lora_rank
    paged = (mla, num_blocks, block_size)
    return Cache(
        latents=array((*paged, rank), latent_dtype),
        latent_scales=array((*paged, rank // LATENT_SCALE_CHANNELS), jnp.float32) if fp8 else None,
        pooled=array((mla, num_blocks, block_size // config.index_kpool, config.index_head_dim), dtype),
        ring=array(
            (mla, num_request_slots, ring_rows(config.index_kpool, drafts), 2, config.index_head_dim), dtype
        ),
        kda_state=array((kda, num_state_slots, heads, dim, dim), wide),
        conv=array((kda, num_state_slots, config.conv_kernel - 1 + window, 3, heads * dim), dtype),
        records=KdaRecords(
            k=per_window(dim), v=per_window(dim), log_decay=per_window(dim), beta=per_window()
        ),
        rows=RowState(
            position=array((num_request_slots,), jnp.int32),
            accepted=array((num_request_slots,), jnp.int32),
            tokens=array((num_request_slots, window), jnp.int32),
        ),
        sampler=SamplerTables(
            counts=array((num_request_slots, config.vocab_size), jnp.int32),
            prompt=array((num_request_slots, config.vocab_size), jnp.bool_),
            bias=array((num_request_slots, config.vocab_size), jnp.float32),
            ends=array((num_request_slots, config.vocab_size), jnp.bool_),
        ),
    )


def create(config: Config, *, fill: float = 0.0, **geometry: Any) -> Cache:
    """Allocates the cache of `shapes`. `fill` is NaN in tests, so that a read of unused memory shows."""

    def leaf(spec: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.full(spec.shape, fill if jnp.issubdtype(spec.dtype, jnp.inexact) else 0, spec.dtype)

    return jax.tree.map(leaf, shapes(config, **geometry))


def write_sampler_row(cache: Cache, slot: jax.Array, row: SamplerTables) -> Cache:
    """Sets one request slot's tables (`row`'s leaves are `[vocab]`): at admission, or when it resumes."""
    tables = jax.tree.map(lambda table, values: table.at[slot].set(values), cache.sampler, row)
    return replace(cache, sampler=tables)


def slot_or_drop(slots: jax.Array, size: int) -> jax.Array:
    """-1 becomes an index past the end: JAX wraps negative indices but can drop writes that lie outside."""
    return jnp.where(slots < 0, size, slots)
