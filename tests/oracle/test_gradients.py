"""jax.grad of the next-token loss is finite and agrees with torch's backward pass through the reference.

`gradient_checks.check_gradients` holds the assertions, one for each trunk parameter.
"""

from pathlib import Path

import pytest

from .cases import Case
from .gradient_checks import check_gradients

CASES = [
    Case("pool4", "plain", (40, 40), 40, (("num_nextn_predict_layers", 0),)),
    Case("softplus", "plain", (40, 40), 40, (("num_nextn_predict_layers", 0),)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case, tmp_path: Path) -> None:
    check_gradients(case, tmp_path, "float32")
