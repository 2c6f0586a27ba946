"""Independent oracles in numpy float64, one token and one expert at a time."""

import numpy as np


def wide(array) -> np.ndarray:
    """Any array, bfloat16 and float8 too, as float64."""
    return np.asarray(array).astype(np.float64)


def swiglu(gate: np.ndarray, up: np.ndarray, limit: float) -> np.ndarray:
    gate = np.minimum(gate, limit)
    return gate / (1 + np.exp(-gate)) * np.clip(up, -limit, limit)


def grouped_mlp(x, expert_ids, expert_weights, gate_up, down, limit: float) -> np.ndarray:
    x, gate_up, down, expert_weights = map(wide, (x, gate_up, down, expert_weights))
    out = np.zeros_like(x)
    for token, (ids, weights) in enumerate(zip(np.asarray(expert_ids), expert_weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if expert >= 0:
                hidden = swiglu(gate_up[expert, 0] @ x[token], gate_up[expert, 1] @ x[token], limit)
                out[token] += weight * (down[expert] @ hidden)
    return out


def dequantize(values, scales, block: int = 128) -> np.ndarray:
    """[out, in] values times the scale of their block, element by element."""
    out = wide(values)
    for row in range(out.shape[0]):
        for column in range(out.shape[1]):
            out[row, column] *= wide(scales)[row // block, column // block]
    return out
