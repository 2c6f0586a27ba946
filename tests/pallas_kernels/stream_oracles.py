"""Hyper-connections in numpy float64, one token at a time."""

import numpy as np


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def pre(streams, fn, base, scale, norm_eps: float, hc_eps: float, iterations: int):
    streams, fn, base, scale = (np.asarray(a).astype(np.float64) for a in (streams, fn, base, scale))
    tokens, n, dim = streams.shape
    hidden, post, comb = np.zeros((tokens, dim)), np.zeros((tokens, n)), np.zeros((tokens, n, n))
    for t in range(tokens):
        flat = streams[t].reshape(-1)
        z = fn @ (flat / np.sqrt((flat**2).mean() + norm_eps))
        before = sigmoid(z[:n] * scale[0] + base[:n]) + hc_eps
        post[t] = 2 * sigmoid(z[n : 2 * n] * scale[1] + base[n : 2 * n])
        matrix = np.exp((z[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n))
        matrix = matrix / matrix.sum(1, keepdims=True) + hc_eps
        matrix = matrix / (matrix.sum(0) + hc_eps)
        for _ in range(iterations - 1):
            matrix = matrix / (matrix.sum(1)[:, None] + hc_eps)
            matrix = matrix / (matrix.sum(0) + hc_eps)
        comb[t] = matrix
        hidden[t] = before @ streams[t]
    return hidden, post, comb


def post(streams, out, weights, comb) -> np.ndarray:
    streams, out, weights, comb = (np.asarray(a).astype(np.float64) for a in (streams, out, weights, comb))
    result = np.zeros_like(streams)
    for t in range(streams.shape[0]):
        for k in range(streams.shape[1]):
            result[t, k] = weights[t, k] * out[t]
            for j in range(streams.shape[1]):
                result[t, k] += comb[t, j, k] * streams[t, j]
    return result
