"""Which tokens a row may sample, by sorting, in numpy float64; and the noise in Python integers."""

import math

import numpy as np

WORD = 2**32 - 1


def kept(logits, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """[vocabulary] bool for one row with a temperature above 0; every tie at an edge is kept."""
    logits = np.asarray(logits, np.float64)
    scaled = logits / temperature
    probabilities = np.exp(scaled - scaled.max())
    keep = probabilities >= min_p * probabilities.max()
    if top_k > 0:
        keep &= logits >= np.sort(logits[keep])[::-1][: min(top_k, keep.sum())].min()
    if top_p < 1:
        total = probabilities[keep].sum()
        edge = math.inf
        for value in np.unique(logits[keep])[::-1]:
            edge = value
            if probabilities[keep & (logits >= value)].sum() >= top_p * total:
                break
        keep &= logits >= edge
    return keep & np.isfinite(logits)


def mix(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & WORD
    return x ^ (x >> 16)


def gumbel(seed: int, choice: int, position: int, token: int) -> float:
    seed, choice, position = (x & WORD for x in (seed, choice, position))
    first = mix(mix(mix((seed + 0x9E3779B9) & WORD) ^ choice) ^ position)
    second = mix(mix(mix((position + 0x85EBCA6B) & WORD) ^ choice) ^ seed)
    bits = mix(mix((token * 0x9E3779B9 + first) & WORD) ^ second)
    return -math.log(-math.log1p(-min((bits + 0.5) / 2**32, 1 - 2**-24)))
