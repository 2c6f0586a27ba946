"""A folder of safetensors files as one mapping from tensor name to tensor."""

from pathlib import Path

import numpy as np

from glm_jax.config import ConfigError, read_json
from glm_jax.parameter_layers import TEXT_PREFIX
from glm_jax.safetensors_file import CheckpointError, SafetensorsFile, TensorEntry, listed

INDEX_NAME = "model.safetensors.index.json"
# Where published and re-saved checkpoints keep the text model; the released one is first.
_TEXT_PREFIXES = (TEXT_PREFIX, "model.", "")


class CheckpointFiles:
    """The tensors of a folder, checked against its index where it has one.

    Attributes:
        entries: `{name: TensorEntry}` over all files.
        text_prefix: what takes the place of `model.language_model.` in this folder's tensor names.

    Raises:
        CheckpointError: no file, a missing shard, files and index that disagree, a truncated or corrupt file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._owners: dict[str, SafetensorsFile] = {}
        self._files: list[SafetensorsFile] = []
        index = folder / INDEX_NAME
        if index.is_file():
            self._open_indexed(index)
        else:
            self._open_all()
        self.entries: dict[str, TensorEntry] = {
            name: file.entries[name] for name, file in self._owners.items()
        }
        self.text_prefix = next(
            (prefix for prefix in _TEXT_PREFIXES if f"{prefix}embed_tokens.weight" in self.entries),
            TEXT_PREFIX,
        )

    def disk_name(self, name: str) -> str:
        """This folder's spelling of a released tensor name."""
        if name.startswith(TEXT_PREFIX):
            return self.text_prefix + name.removeprefix(TEXT_PREFIX)
        return name

    def tensor(self, name: str) -> np.ndarray:
        """Memory-mapped read-only view of a tensor, by its name in this folder."""
        return self._owners[name].tensor(name)

    def release(self) -> None:
        """Gives back the memory of the pages read so far."""
        for file in self._files:
            file.release()

    def _open_all(self) -> None:
        paths = sorted(self.folder.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"{self.folder}: no *.safetensors file")
        for path in paths:
            file = SafetensorsFile(path)
            self._files.append(file)
            for name in file.entries:
                if name in self._owners:
                    first = self._owners[name].path.name
                    raise CheckpointError(f"{self.folder}: {name} is in both {first} and {path.name}")
                self._owners[name] = file

    def _open_indexed(self, index: Path) -> None:
        try:
            weight_map = read_json(index).get("weight_map")
        except ConfigError as error:
            raise CheckpointError(str(error)) from error
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            raise CheckpointError(
                f"{index}: corrupt: weight_map must map tensor names to names of files beside it"
            )
        shards = sorted(set(weight_map.values()))
        missing = [shard for shard in shards if not (self.folder / shard).is_file()]
        if missing:
            raise CheckpointError(f"{index}: names shards that are not there:{listed(missing)}")
        files = {shard: SafetensorsFile(self.folder / shard) for shard in shards}
        problems = [
            f"{name}: not in {shard}"
            for name, shard in weight_map.items()
            if name not in files[shard].entries
        ]
        problems += [
            f"{name}: in {shard} but not in the index"
            for shard, file in files.items()
            for name in file.entries
            if weight_map.get(name) != shard
        ]
        if problems:
            raise CheckpointError(f"{index}: index and shards disagree:{listed(problems)}")
        self._files = list(files.values())
        self._owners = {name: files[shard] for name, shard in weight_map.items()}
