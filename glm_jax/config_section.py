"""Typed reads from a parsed config.json, each naming its field when it refuses."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm_jax.config_schema import ConfigError, refuse


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON file that must hold an object.

    Raises:
        ConfigError: it is not valid JSON or not an object.
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


class Section:
    """One level of the file; `prefix` is what stands before its field names in messages."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values, self.prefix = values, prefix

    def integer(self, name: str, default: int, minimum: int = 1) -> int:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise refuse(self.prefix + name, value, f"an integer of at least {minimum}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise refuse(self.prefix + name, value, "a positive number")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise refuse(self.prefix + name, value, "true or false")
        return value

    def names(self, name: str, mapping: Mapping[str, str]) -> tuple[Any, ...] | None:
        """A list of words translated by `mapping`; None when absent or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, str | list | tuple):
            raise refuse(self.prefix + name, value, f"a list of {sorted(mapping)}")
        for position, word in enumerate(value):
            if not isinstance(word, str) or word not in mapping:
                raise refuse(f"{self.prefix}{name}[{position}]", word, f"one of {sorted(mapping)}")
        return tuple(mapping[word] for word in value)

    def section(self, name: str) -> "Section | None":
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise refuse(self.prefix + name, value, "an object")
        return Section(value, f"{self.prefix}{name}.")
