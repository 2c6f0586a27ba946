"""The checkpoint's sampling defaults."""

import json
from pathlib import Path

import pytest

from glm_jax.generation_config import load_sampling_defaults


def test_defaults_of_the_released_checkpoint(tmp_path: Path) -> None:
    raw = {"temperature": 1.0, "top_p": 0.95, "eos_token_id": [154820, 154827, 154829], "top_k": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    assert load_sampling_defaults(tmp_path) == {"temperature": 1.0, "top_p": 0.95}


def test_no_file_no_defaults(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize("text", ["[1]", "{"])
def test_broken_files_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        load_sampling_defaults(tmp_path)
