"""Live differential test: fresh random models, float32, whole left-padded batches of mixed lengths."""

from pathlib import Path

import pytest

from .cases import CASES, Case, boundary_lengths
from .whole_checks import check_whole_run


def test_the_cases_cover_what_they_claim() -> None:
    assert len(CASES) >= 40
    for name in {case.architecture for case in CASES}:
        seen = {length for case in CASES if case.architecture == name for length in case.lengths}
        wanted = set(boundary_lengths(name))
        assert len(seen & wanted) >= min(len(wanted), 15)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_whole_run(case: Case, tmp_path: Path) -> None:
    check_whole_run(case, tmp_path, "float32")
