"""The checkpoint's sampling defaults, and every one of its end tokens."""

import json
from pathlib import Path

import pytest

from glm_jax.generation_config import load_generation_config


def test_defaults_and_all_end_tokens(tmp_path: Path) -> None:
    raw = {
        "temperature": 1.0,
        "top_p": 0.95,
        "eos_token_id": [154820, 154827, 154829],
        "pad_token_id": 154820,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    config = load_generation_config(tmp_path, eos_token_ids=(154820, 7))
    assert config.defaults == {"temperature": 1.0, "top_p": 0.95}
    assert config.eos_token_ids == (154820, 154827, 154829, 7)


def test_a_single_end_token_and_no_file(tmp_path: Path) -> None:
    assert load_generation_config(tmp_path, (3,)).eos_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert load_generation_config(tmp_path).eos_token_ids == (5,)


@pytest.mark.parametrize("text", ["[1]", "{", '{"eos_token_id": "x"}'])
def test_broken_files_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        load_generation_config(tmp_path)
