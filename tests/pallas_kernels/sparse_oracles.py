"""Plain numpy in float64 for sparse attention and the k-pool indexer: nothing shared with what they check."""

import numpy as np


def attention(q: np.ndarray, latents: np.ndarray, indices: np.ndarray, scale: float) -> np.ndarray:
    """q [tokens, heads, dim], latents [rows, dim] of one layer, indices [tokens, width]; -1 is none."""
    q = q.astype(np.float64)
    out = np.zeros(q.shape)
    for t in range(q.shape[0]):
        chosen = latents[[i for i in indices[t] if i >= 0]].astype(np.float64)
        if len(chosen) == 0:
            continue
        for h in range(q.shape[1]):
            scores = chosen @ q[t, h] * scale
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ chosen / weights.sum()
    return out


def pool_key(keys: np.ndarray, gates: np.ndarray, ape: np.ndarray) -> np.ndarray:
    """keys, gates, ape [kpool, dim] -> [dim]."""
    weights = np.exp(gates.astype(np.float64) + ape.astype(np.float64))
    return (weights * keys.astype(np.float64)).sum(0) / weights.sum(0)


def scores(q: np.ndarray, head_weights: np.ndarray, pooled: np.ndarray) -> np.ndarray:
    """q [tokens, heads, dim], head_weights [tokens, heads], pooled [pools, dim] -> [tokens, pools]."""
    dots = np.einsum("thd,pd->thp", q.astype(np.float64), pooled.astype(np.float64)) / np.sqrt(q.shape[-1])
    return np.einsum("thp,th->tp", np.maximum(dots, 0), head_weights.astype(np.float64))


def select(scores: np.ndarray, count: int, k: int) -> list[int]:
    """One query's best pools: a stable sort, so the lowest index wins a tie; Python compares -0.0 == 0.0."""
    best = sorted(range(int(count)), key=lambda p: -scores[p])[:k]
    return sorted(best) + [-1] * (k - len(best))


def member_tokens(pools: list[int], position: int, kpool: int) -> list[int]:
    """The tokens of the pools, then the open pool's tokens up to the query."""
    tokens = [p * kpool + s for p in pools if p >= 0 for s in range(kpool)]
    return tokens + list(range((position + 1) // kpool * kpool, position + 1))
