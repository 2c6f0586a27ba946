"""Hyper-connections at the released model's width."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import hyper_connection as op
from tests.amd.gate import Case

DIM = 4096


def struct(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def cases() -> list[Case]:
    found = []
    for tokens in (32, 8192):
        streams, out = struct((tokens, 4, DIM), jnp.bfloat16), struct((tokens, DIM), jnp.bfloat16)
        gates = struct((tokens, 4)), struct((tokens, 4, 4))
        weights = struct((24, 4 * DIM), jnp.bfloat16), struct((24,)), struct((3,))
        options = {"norm_eps": 1e-5, "hc_eps": 1e-6, "sinkhorn_iterations": 20, "implementation": "triton"}
        boundary = functools.partial(op.hyper_connection_post_pre, **options)
        pre = functools.partial(op.hyper_connection_pre, **options)
        post = functools.partial(op.hyper_connection_post, implementation="triton")
        dots = ("hyper_connection_mix",)
        name = f"hyper-connection {{}}, {tokens} tokens"
        found += [
            Case(name.format("boundary"), boundary, (streams, out, *gates, *weights), dots=dots),
            Case(name.format("pre"), pre, (streams, *weights), dots=dots),
            Case(name.format("post"), post, (streams, out, *gates)),
        ]
    return found
