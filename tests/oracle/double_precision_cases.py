"""The same checks in float64, where no rounding excuses a difference. `test_double_precision` runs this
file in a process of its own, because jax_enable_x64 is a setting of the whole process."""

from pathlib import Path

import pytest

from .cached_checks import check_cached_run
from .cases import ROWS, TIME, Case
from .checkpoint import REGIMES
from .gradient_checks import check_gradients
from .whole_checks import check_whole_run

WHOLE = [
    Case(architecture, regime, (TIME, 67, 17, 6))
    for architecture in ("pool4", "far_shared", "softplus", "groups")
    for regime in REGIMES
]


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_whole_run(case: Case, tmp_path: Path) -> None:
    check_whole_run(case, tmp_path, "float64")


@pytest.mark.parametrize("architecture", ["shared"])
def test_cached_run(architecture: str, tmp_path: Path) -> None:
    check_cached_run(Case(architecture, "plain", (TIME,) * ROWS), tmp_path, "float64", window=3)


def test_gradients(tmp_path: Path) -> None:
    case = Case("pool4", "plain", (40, 40), 40, (("num_nextn_predict_layers", 0),))
    check_gradients(case, tmp_path, "float64")
