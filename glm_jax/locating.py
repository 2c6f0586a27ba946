"""From what a user writes (a folder, a Hub id, "tiny") to a folder on this machine."""

import os
import re
from pathlib import Path

TINY = "tiny"
TINY_FOLDER = Path(__file__).parent / "checkpoints" / TINY
ORBAX_FOLDER = "params"  # the Orbax part of a folder written by `glm_jax.checkpoint`
TEXT_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model")  # configuration, tokenizer and chat template
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def locate(path: str | os.PathLike[str]) -> Path:
    """The checkpoint's folder, downloaded from the Hub when need be (not when `HF_HUB_OFFLINE` is set).

    Raises:
        FileNotFoundError: no such folder, no config.json in it, or nothing to be had from the Hub.
    """
    name = os.fspath(path)
    folder = TINY_FOLDER if name == TINY else Path(name)
    if not folder.is_dir() and name != TINY and _HUB_ID.fullmatch(name):
        folder = _from_hub(name)
    if not folder.exists():
        raise FileNotFoundError(f"no checkpoint at {folder}: not a folder, not a Hub id, not {TINY!r}")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no checkpoint in {folder}: it has no config.json")
    return folder


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=[*TEXT_PATTERNS, "*.safetensors"]))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise FileNotFoundError(f"{name}: no such folder, and not to be had from the Hub: {error}") from error
