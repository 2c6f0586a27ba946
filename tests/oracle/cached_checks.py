"""The cached path against whole runs of the reference, in the given precision."""

from pathlib import Path

import numpy as np

import glm_jax

from .cached_run import CachedRun
from .cases import ROWS, TIME, Case
from .comparison import assert_close
from .reference import Reference

PIECES = np.array([17, 3, 2, 1])  # of the four rows
PROMPTS = np.array([41, 38, 35, 33])  # decode begins at different offsets inside a pool and a block
PATTERNS = {1: (1,), 3: (1, 3, 2, 1, 1, 3, 3, 2)}  # accepted tokens of a window, walked through row by row


def check_cached_run(case: Case, folder: Path, dtype: str, window: int) -> None:
    """Rows prefilled in pieces of 17, 3, 2 and 1 tokens at once, then decoded to the end by windows."""
    case.write(folder)
    tokens, _ = case.inputs()
    expected = Reference(folder, dtype).run(tokens)
    run = CachedRun(glm_jax.load(folder, dtype=dtype), tokens, window, seed=window)
    while (run.done < PROMPTS).any():
        run.prefill(np.minimum(PIECES, PROMPTS - run.done), capacity=int(PIECES.sum()) + 1)
    pattern = PATTERNS[window]
    step = 0
    while (run.done < TIME).any():
        run.decode(np.array([pattern[(step + row) % len(pattern)] for row in range(ROWS)]))
        step += 1
    assert_close(f"logits of pieces and decode windows of {window}", run.logits, expected.logits)
