"""Prefill in pieces of 1, 2, 3 and 17 tokens, then decode, against whole runs of the reference.

`cached_checks.check_cached_run` holds the assertions: logits of every piece and window, within the tolerance.
"""

from pathlib import Path

import pytest

from .cached_checks import check_cached_run
from .cases import ROWS, TIME, Case

# Each architecture with a regime in which a slip of the cached path would show most.
PLAIN = (("pool16", "plain"), ("softplus", "weak"), ("clamped", "saturated"))
DRAFTED = (("pool4", "ties"), ("shared", "plain"), ("far_shared", "ties"), ("groups", "large"))


def _cases(pairs: tuple[tuple[str, str], ...]) -> list[Case]:
    return [Case(architecture, regime, (TIME,) * ROWS) for architecture, regime in pairs]


@pytest.mark.parametrize("case", _cases(PLAIN), ids=str)
def test_plain_decode(case: Case, tmp_path: Path) -> None:
    check_cached_run(case, tmp_path, "float32", window=1)


@pytest.mark.parametrize("case", _cases(DRAFTED), ids=str)
def test_decode_windows_with_rejected_drafts(case: Case, tmp_path: Path) -> None:
    check_cached_run(case, tmp_path, "float32", window=3)
