"""The random cases: architecture x regime x row lengths, in few distinct shapes."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .architectures import FEATURES, VOCABULARY, configuration
from .checkpoint import REGIMES, random_checkpoint, write_folder

SEED = int(os.environ.get("ORACLE_SEED", "0"))
ROWS, TIME, LONG_TIME = 4, 80, 1000
CHUNKS = (16, 64)


@dataclass(frozen=True)
class Case:
    """One checkpoint and one left-padded batch; `lengths` are the real tokens of its rows."""

    architecture: str
    regime: str
    lengths: tuple[int, ...]
    time: int = TIME
    overrides: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return "-".join(
            [self.architecture, self.regime, str(self.time), *(f"{k}={v}" for k, v in self.overrides)]
        )

    @property
    def config(self) -> dict[str, Any]:
        return configuration(self.architecture, SEED, **dict(self.overrides))

    def write(self, folder: Path) -> Path:
        """Writes this case's checkpoint as a Hugging Face folder."""
        config = self.config
        return write_folder(folder, config, random_checkpoint(config, SEED, self.regime))

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [rows, time] int32, and the mask [rows, time], False at left padding."""
        generator = np.random.default_rng([SEED, *str(self).encode()])
        # Half of the rows draw from few tokens, so that they repeat themselves as text does.
        tokens = generator.integers(0, VOCABULARY, (len(self.lengths), self.time), np.int32)
        tokens[1::2] %= 5
        mask = np.arange(self.time) >= self.time - np.array(self.lengths)[:, None]
        return tokens, mask


def boundary_lengths(name: str) -> list[int]:
    """Lengths around every edge of pool, selection and recurrence chunk, for one architecture."""
    features = FEATURES[name][2]
    kpool, topk = features["index_kpool"], features["index_topk"]
    edges = {1, kpool, 2 * kpool, topk, topk + kpool, topk + 2 * kpool, *CHUNKS, 48, TIME - 1}
    around = {edge + offset for edge in edges for offset in (-1, 0, 1)}
    return sorted(length for length in around if 1 <= length <= TIME)


def _short_cases() -> list[Case]:
    cases = []
    for name in FEATURES:
        lengths = np.random.default_rng([SEED, len(name)]).permutation(boundary_lengths(name)).tolist()
        for index, regime in enumerate(REGIMES):
            # The first row is full; the others walk through the boundary lengths from case to case.
            start = index * (ROWS - 1)
            walk = (lengths + lengths)[start : start + ROWS - 1]
            cases.append(Case(name, regime, (TIME, *walk)))
    return cases


def _long_cases() -> list[Case]:
    """A thousand tokens with the gate at its bound, and with weak gates over correlated keys; both gates."""
    return [
        Case(name, regime, (LONG_TIME,), LONG_TIME)
        for name in ("pool4", "softplus")
        for regime in ("saturated", "weak")
    ]


CASES = _short_cases() + _long_cases()
