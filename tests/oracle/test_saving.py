"""What glm_jax writes, transformers reads."""

from pathlib import Path

import numpy as np
import pytest

import glm_jax
from glm_jax.saving import save

from .cases import TIME, Case
from .reference import Reference


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_transformers_loads_a_saved_model_to_equal_logits(dtype: str | None, tmp_path: Path) -> None:
    case = Case("shared", "plain", (TIME, 33), TIME)
    case.write(tmp_path / "original")
    tokens, mask = case.inputs()
    save(glm_jax.load(tmp_path / "original", dtype=dtype), tmp_path / "saved")
    original = Reference(tmp_path / "original").run(tokens, mask)
    saved = Reference(tmp_path / "saved").run(tokens, mask)
    np.testing.assert_array_equal(saved.logits, original.logits)
