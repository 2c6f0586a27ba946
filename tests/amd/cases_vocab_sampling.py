"""Sampling from the released model's vocabulary."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.vocab_sampling import sample_tokens
from tests.amd.gate import Case


def cases() -> list[Case]:
    rows, vocabulary = 32, 154_880
    column = [jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.float32, jnp.int32)]
    parameters = [column[i] for i in (0, 1, 0, 0, 1, 1, 1)]
    logits = jax.ShapeDtypeStruct((rows, vocabulary), jnp.float32)
    function = functools.partial(sample_tokens, implementation="triton")
    return [Case("sampling 32 rows", function, (logits, *parameters))]
