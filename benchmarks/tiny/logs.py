"""Training logs: a run and its continuations on one time axis."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_logs(logs: Sequence[Path]) -> list[dict[str, Any]]:
    """The lines of all runs; each run's seconds and tokens go on from where the one before it ended."""
    lines: list[dict[str, Any]] = []
    for run, log in enumerate(logs):
        seconds, tokens = (lines[-1]["seconds"], lines[-1]["tokens"]) if lines else (0.0, 0)
        for text in log.read_text().splitlines():
            line = json.loads(text)
            moved = {"seconds": line["seconds"] + seconds, "tokens": line["tokens"] + tokens, "run": run}
            lines.append(line | moved)
    return lines
