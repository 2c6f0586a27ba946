"""The k-pool indexer at the released model's shapes: scores of a prompt's pools and of 32 long contexts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.pool_index import select_paged
from tests.amd.gate import Case

HEADS, DIM, LAYERS, BLOCKS, POOLS_A_BLOCK, TOP = 32, 128, 12, 4096, 16, 512


def struct(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def selection(requests: int, tokens: int, pools: int) -> Case:
    count = requests * tokens
    ids = struct((count,), jnp.int32)
    arguments = (
        struct((count, HEADS, DIM), jnp.bfloat16),
        struct((count, HEADS)),
        struct((LAYERS, BLOCKS, POOLS_A_BLOCK, DIM), jnp.bfloat16),
        struct((), jnp.int32),
        struct((requests, pools // POOLS_A_BLOCK), jnp.int32),
        ids,
        ids,
    )
    function = functools.partial(select_paged, k=TOP, implementation="triton")
    return Case(
        f"indexer, {requests} x {tokens} tokens, {pools} pools", function, arguments, dots=("score_pools",)
    )


def cases() -> list[Case]:
    return [selection(1, 8192, 2048), selection(32, 1, 8192), selection(32, 4, 65_536)]
