"""Prefill in pieces of 1, 2, 3 and 17 tokens, then decode, against whole runs of the reference."""

from pathlib import Path

import pytest

from .cached_checks import check_cached_run
from .cases import ROWS, TIME, Case

# Every architecture; each with a regime in which a slip of the cached path would show most.
CASES = [
    Case(architecture, regime, (TIME,) * ROWS)
    for architecture, regime in (
        ("pool4", "ties"),
        ("pool16", "plain"),
        ("shared", "plain"),
        ("far_shared", "ties"),
        ("softplus", "weak"),
        ("groups", "large"),
        ("clamped", "saturated"),
    )
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_decode(case: Case, tmp_path: Path) -> None:
    check_cached_run(case, tmp_path, "float32", window=1)


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_decode_windows_with_rejected_drafts(case: Case, tmp_path: Path) -> None:
    check_cached_run(case, tmp_path, "float32", window=3)
