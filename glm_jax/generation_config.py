"""The sampling defaults that a checkpoint ships in generation_config.json (`load_config` reads its end
tokens)."""

from pathlib import Path

from glm_jax.config import read_json

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p")


def load_sampling_defaults(folder: str | Path) -> dict[str, float]:
    """SamplingParams fields to use where a request leaves them out; empty without a generation_config.json.

    Raises ConfigError for a file that is no JSON object.
    """
    file = Path(folder) / "generation_config.json"
    if not file.is_file():
        return {}
    raw = read_json(file)
    return {name: raw[name] for name in SAMPLING_FIELDS if raw.get(name) is not None}
