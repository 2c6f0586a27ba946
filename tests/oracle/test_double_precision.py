"""Runs the float64 comparisons in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("double_precision_cases.py")


def test_float64_agrees_to_1e_9() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(CASES)],
        env={**os.environ, "JAX_ENABLE_X64": "1"},
        cwd=CASES.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    print(run.stdout[-6000:], run.stderr[-2000:])
    assert run.returncode == 0
