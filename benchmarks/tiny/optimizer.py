"""Muon for matrices inside layers, Adam for everything else."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.tiny.parameters import Params

ADAM = (
    "embed",
    "head",
    "mla.q_norm",
    "mla.kv_norm",
    "moe.router",
    "kda.beta",
    "kda.conv",
    "index.weights",
    "index.ape",
)
ADAM_ENDINGS = ("norm", "base", "scale", "bias", "A_log")
MUON_MOMENTUM = 0.95
ADAM_MOMENTS = (0.9, 0.98)
MUON_UPDATE_RMS = (
    0.2  # scaled to Adam's typical update, so that one learning rate serves both (Moonlight, 2502.16982)
)


class OptimizerState(NamedTuple):
    """momentum of every parameter, second moments of Adam's, steps taken (float32)."""

    momentum: Params
    second: Params
    steps: jax.Array


def uses_adam(name: str) -> bool:
    return name in ADAM or name.endswith(ADAM_ENDINGS)


def initialise(params: Params) -> OptimizerState:
    momentum = {name: jnp.zeros_like(value) for name, value in params.items()}
    second = {name: jnp.zeros_like(value) for name, value in params.items() if uses_adam(name)}
    return OptimizerState(momentum, second, jnp.zeros((), jnp.float32))


def orthogonalise(g: jax.Array) -> jax.Array:
    """Nearest orthogonal matrix of each [..., rows, columns]: five quintic Newton-Schulz steps, bfloat16."""
    tall = g.shape[-2] > g.shape[-1]
    x = jnp.swapaxes(g, -1, -2) if tall else g
    x = (x / (jnp.linalg.norm(x, axis=(-1, -2), keepdims=True) + 1e-7)).astype(jnp.bfloat16)
    for _ in range(5):
        a = x @ jnp.swapaxes(x, -1, -2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return (jnp.swapaxes(x, -1, -2) if tall else x).astype(jnp.float32)


def update(
    params: Params, grads: Params, state: OptimizerState, rate: jax.Array, decay: float
) -> tuple[Params, OptimizerState, jax.Array]:
    """One step, gradients clipped to norm 1, and the gradient's norm. Routing biases are left alone."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
    clip = jnp.minimum(1.0, 1.0 / (norm + 1e-6))
    steps = state.steps + 1
    new_params, momentum, second = {}, {}, dict(state.second)
    b1, b2 = ADAM_MOMENTS
    for name, value in params.items():
        g = grads[name] * clip
        if name == "moe.bias":
            new_params[name], momentum[name] = value, state.momentum[name]
            continue
        if uses_adam(name):
            m = b1 * state.momentum[name] + (1 - b1) * g
            v = b2 * state.second[name] + (1 - b2) * g * g
            second[name] = v
            step = (m / (1 - b1**steps)) / (jnp.sqrt(v / (1 - b2**steps)) + 1e-8)
        else:
            m = MUON_MOMENTUM * state.momentum[name] + g
            step = orthogonalise(g + MUON_MOMENTUM * m) * MUON_UPDATE_RMS * math.sqrt(max(value.shape[-2:]))
        shrink = 0.0 if name.endswith(ADAM_ENDINGS) or name == "index.ape" else decay
        momentum[name] = m
        new_params[name] = value - rate * (step + shrink * value)
    return new_params, OptimizerState(momentum, second, steps), norm
