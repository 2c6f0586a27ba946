"""KDA prefill on Pallas-Triton: a token-parallel kernel, then one that is serial over a row's chunks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.kda_chunk_plan import chunk_plan
from pallas_kernels.kda_intra_kernel import LOWEST_GATE, intra
from pallas_kernels.kda_state_kernel import scan_states
from pallas_kernels.triton import Launch


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Tiles and launch parameters of the prefill kernels on one platform."""

    chunk: int  # tokens: 16, 32 or 64
    columns: int  # value columns of one program of the state kernel
    intra: Launch
    state: Launch
    precision: str  # of the token-parallel kernel's float32 dots when the inputs are bfloat16
    exact: str  # of dots that keep float32: float32 inputs, and the maps that join segments
    segments: int = 1  # parts of a row whose states run in parallel, joined by their affine maps


CUDA = PrefillConfig(
    chunk=32,
    columns=64,
    intra=Launch(4, num_stages=1),
    state=Launch(4, num_stages=2),
    precision="tf32",
    exact="tf32x3",
)
ROCM = PrefillConfig(
    chunk=32,
    columns=64,
    intra=Launch(4, num_stages=1),
    state=Launch(4, num_stages=1),
    precision="ieee",
    exact="ieee",
)


def choose(config: PrefillConfig, tokens: int, rows: int, heads: int) -> PrefillConfig:
    """Narrower tiles, then segments, where rows and heads alone leave most of the GPU idle."""
    if rows * heads >= 64:
        return config
    narrow = dataclasses.replace(config, columns=32, state=dataclasses.replace(config.state, num_warps=2))
    if rows * heads > 16 or tokens < 4096:
        return narrow
    return dataclasses.replace(narrow, segments=min(16, tokens // 2048))


def supported(q: jax.Array, v: jax.Array, gate_lower_bound: float | None) -> bool:
    """Whether the kernels take these shapes, dtypes and gates."""
    dims = (q.shape[-1], v.shape[-1])
    return (
        gate_lower_bound is not None
        and gate_lower_bound >= LOWEST_GATE
        and all(dim >= 16 and dim & (dim - 1) == 0 for dim in dims)
        and all(x.dtype in (jnp.float32, jnp.bfloat16) for x in (q, v))
        and q.shape[0] > 0
    )


def prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    cu_seqlens: jax.Array,
    checkpoints: jax.Array,
    *,
    config: PrefillConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The kernels' `kda.kda_prefill`: out, final states and snapshots [R, M, H, K, V] (M may be 0)."""
    exact = "ieee" if interpret else config.exact  # the interpreter's dots are float32 as they are
    precision = exact if v.dtype == jnp.float32 else config.precision
    plan = chunk_plan(cu_seqlens, checkpoints, q.shape[0], config.chunk)
    terms = intra(
        plan, q, k, v, log_decay, beta,
        chunk=config.chunk, launch=config.intra, precision=precision, interpret=interpret,
    )  # fmt: skip
    out, states, snapshots = scan_states(
        plan, initial_state, terms, v,
        chunk=config.chunk, width=min(config.columns, v.shape[2]), segments=config.segments,
        precision=exact, launch=config.state, interpret=interpret,
    )  # fmt: skip
    real = jnp.arange(q.shape[0]) < cu_seqlens[-1]
    # Nothing wrote the padding; this fuses with what reads the output.
    return jnp.where(real[:, None, None], out, 0), states, snapshots
