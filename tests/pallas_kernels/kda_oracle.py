"""KDA and the short convolution written as plain numpy loops in float64, and inputs that stress them."""

from __future__ import annotations

import numpy as np

GATES = ("random", "saturated", "weak", "unbounded")


def recurrence(q, k, v, log_decay, beta, state):
    """One row: q, k, log_decay [time, H, K], v [time, H, V], beta [time, H], state [H, K, V], all float64."""
    state = np.array(state, np.float64)
    out = np.zeros(v.shape)
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            decayed = np.exp(log_decay[t, h])[:, None] * state[h]
            update = beta[t, h] * (v[t, h] - decayed.T @ k[t, h])
            state[h] = decayed + np.outer(k[t, h], update)
            out[t, h] = state[h].T @ q[t, h]
    return out, state


def convolution(x, weight, history):
    """One row: x [time, C], weight [C, taps], history [taps - 1, C] -> SiLU(causal convolution)."""
    taps = weight.shape[1]
    full = np.concatenate([history, x])
    y = np.array([sum(weight[:, j] * full[t + j] for j in range(taps)) for t in range(len(x))]).reshape(
        x.shape
    )
    return y / (1 + np.exp(-y)), full[len(full) - (taps - 1) :]


def gate(rng, kind, shape):
    """Log decays: spread over (-5, 0); at the bound of -5; weak; softplus-like without a bound."""
    if kind == "random":
        return -5 / (1 + np.exp(1 - 2 * rng.normal(size=shape)))
    if kind == "saturated":
        return np.full(shape, -5.0)
    if kind == "weak":
        return np.full(shape, -1e-3)
    return -np.exp(3 * rng.normal(size=shape))


def tokens(rng, lead, heads=2, key_dim=8, value_dim=16, gates="random"):
    """(q, k, v, log_decay, beta) with leading axes `lead`; keys are strongly correlated under weak gates."""
    q = rng.normal(size=(*lead, heads, key_dim))
    k = rng.normal(size=(*lead, heads, key_dim)) + (3.0 if gates == "weak" else 0.0)
    q /= np.linalg.norm(q, axis=-1, keepdims=True) * np.sqrt(key_dim)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(*lead, heads, value_dim))
    beta = 1 / (1 + np.exp(-rng.normal(size=(*lead, heads)) - (2.0 if gates == "weak" else 0.0)))
    return q, k, v, gate(rng, gates, k.shape), beta
