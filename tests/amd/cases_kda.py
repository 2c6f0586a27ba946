"""KDA's kernels at the released model's shapes: 64 heads on one GPU, 8 heads a rank under TP8."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.kda import KdaRecords, kda_decode, kda_prefill
from tests.amd.gate import Case

DIM, LAYERS, SLOTS = 128, 34, 64


def struct(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def prefill(name: str, tokens: int, rows: int, heads: int, dtype=jnp.bfloat16) -> Case:
    token = (tokens, heads, DIM)
    arguments = (
        *(struct(token, dtype) for _ in range(3)),
        struct(token),
        struct(token[:2]),
        struct((rows, heads, DIM, DIM)),
        struct((rows + 1,), jnp.int32),
        struct((rows, 2), jnp.int32),
    )

    def function(*args):
        *args, checkpoints = args
        return kda_prefill(*args, checkpoints=checkpoints, gate_lower_bound=-5.0, implementation="triton")

    segmented = tokens >= 4096 and rows * heads <= 16
    dots = ("kda_prefill_intra", "kda_prefill_state") + (
        ("kda_prefill_segment", "kda_prefill_join") if segmented else ()
    )
    return Case(name, function, arguments, dots=dots)


def decode(name: str, rows: int, window: int, heads: int, dtype=jnp.bfloat16) -> Case:
    shape = (rows, window, heads)
    stacked = (LAYERS, SLOTS, window, heads)
    ids = struct((rows,), jnp.int32)
    records = KdaRecords(
        k=struct((*stacked, DIM), dtype),
        v=struct((*stacked, DIM), dtype),
        log_decay=struct((*stacked, DIM)),
        beta=struct(stacked),
    )
    arguments = (
        *(struct((*shape, DIM), dtype) for _ in range(3)),
        struct((*shape, DIM)),
        struct(shape),
        struct((LAYERS, SLOTS, heads, DIM, DIM)),
        struct((), jnp.int32),
        ids,
        records,
        ids,
        ids,
    )
    function = functools.partial(kda_decode, implementation="triton")
    return Case(
        name,
        lambda *args: function(*args[:-2], publish_after=args[-2], publish_slots=args[-1]),
        (*arguments, ids, ids),
    )


def cases() -> list[Case]:
    return [
        prefill("KDA prefill 8192 x 64 heads", 8192, 4, 64),
        prefill("KDA prefill 8192 x 8 heads", 8192, 1, 8),
        prefill("KDA prefill 1024 x 8 heads", 1024, 2, 8),
        prefill("KDA prefill 1024 x 64 heads, float32", 1024, 1, 64, jnp.float32),
        *(decode(f"KDA decode 32 x 64 heads, window {w}", 32, w, 64) for w in (1, 4, 8)),
        decode("KDA decode 32 x 8 heads, window 4", 32, 4, 8),
    ]
