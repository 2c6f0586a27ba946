"""Training state on disk, in pieces of at most 15 MB that can be carried from machine to machine."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.tiny.optimizer import OptimizerState
from benchmarks.tiny.parameters import Params
from benchmarks.tiny.shape import Shape

PIECE_BYTES = 15_000_000


def save_state(folder: Path, params: Params, optimizer: OptimizerState, progress: dict[str, Any]) -> None:
    """state-N.npz and progress.json; progress.json comes last, so that a folder with it is whole."""
    arrays = {f"params/{k}": v for k, v in params.items()}
    arrays |= {f"momentum/{k}": v for k, v in optimizer.momentum.items()}
    arrays |= {f"second/{k}": v for k, v in optimizer.second.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "progress.json").unlink(missing_ok=True)
    piece: dict[str, np.ndarray] = {}
    number, size = 0, 0
    for name, value in arrays.items():
        host = np.asarray(value)
        if piece and size + host.nbytes > PIECE_BYTES:
            np.savez(folder / f"state-{number}.npz", **piece)
            piece, number, size = {}, number + 1, 0
        piece[name] = host
        size += host.nbytes
    np.savez(folder / f"state-{number}.npz", **piece)
    whole = dict(progress, optimizer_steps=float(optimizer.steps), pieces=number + 1)
    (folder / "progress.json").write_text(json.dumps(whole, indent=1))


def load_shape(folder: Path) -> Shape:
    """The model's shape, from the preset that the run wrote down."""
    return Shape(**json.loads((folder / "preset.json").read_text())["shape"])


def load_state(folder: Path) -> tuple[Params, OptimizerState, dict[str, Any]]:
    """What `save_state` wrote. Raises FileNotFoundError when a piece or progress.json is missing."""
    progress = json.loads((folder / "progress.json").read_text())
    groups: dict[str, Params] = {"params": {}, "momentum": {}, "second": {}}
    for number in range(progress["pieces"]):
        with np.load(folder / f"state-{number}.npz") as piece:
            for name in piece.files:
                group, key = name.split("/")
                groups[group][key] = jnp.asarray(piece[name])
    steps = jnp.float32(progress["optimizer_steps"])
    return groups["params"], OptimizerState(groups["momentum"], groups["second"], steps), progress
