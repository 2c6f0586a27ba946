"""The sampling defaults and end-of-sequence tokens that a checkpoint ships in generation_config.json."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm_jax.json_file import read_json

DEFAULTS_READ = ("temperature", "top_p", "top_k", "min_p")


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """`defaults` holds SamplingParams fields to use where a request leaves them out; `eos_token_ids` all end
    tokens."""

    defaults: Mapping[str, float]
    eos_token_ids: tuple[int, ...]


def load_generation_config(folder: str | Path, eos_token_ids: tuple[int, ...] = ()) -> GenerationConfig:
    """Reads a Hugging Face folder; `eos_token_ids` (from config.json) are kept beside those of the file."""
    file = Path(folder) / "generation_config.json"
    raw: dict[str, Any] = read_json(file)
    defaults = {name: raw[name] for name in DEFAULTS_READ if raw.get(name) is not None}
    listed = raw.get("eos_token_id")
    listed = [] if listed is None else listed if isinstance(listed, list) else [listed]
    if not all(isinstance(token, int) for token in listed):
        raise ValueError(f"{file}: eos_token_id must be an integer or a list of them, got {listed!r}")
    return GenerationConfig(defaults, tuple(dict.fromkeys([*listed, *eos_token_ids])))
