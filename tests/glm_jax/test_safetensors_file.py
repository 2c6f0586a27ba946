"""Our safetensors reader and writer against the reference implementation, and against damaged files."""

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors

from glm_jax.safetensors_file import CheckpointError, SafetensorsFile, SafetensorsWriter, write_file
from tests.tiny_checkpoints import write_file as reference_write


def sample() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "odd_fp8": generator.normal(size=(3, 5)).astype(ml_dtypes.float8_e4m3fn),
        "wide": generator.normal(size=(4, 2)).astype(np.float32),
        "brain": generator.normal(size=(7,)).astype(ml_dtypes.bfloat16),
        "half": generator.normal(size=(2, 1, 3)).astype(np.float16),
        "scalar": np.float32(2.5).reshape(()),
        "empty": np.zeros((0, 4), np.float32),
    }


def test_reads_what_the_reference_writes(tmp_path: Path) -> None:
    tensors = sample()
    reference_write(tmp_path / "x.safetensors", tensors)
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        read = file.tensor(name)
        assert read.dtype == tensor.dtype and read.shape == tensor.shape
        assert read.tobytes() == tensor.tobytes()


def test_reference_reads_what_we_write(tmp_path: Path) -> None:
    tensors = sample()
    write_file(tmp_path / "x.safetensors", tensors)
    content = (tmp_path / "x.safetensors").read_bytes()
    read = dict(safetensors.deserialize(content))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert bytes(read[name]["data"]) == tensor.tobytes(), name
        assert tuple(read[name]["shape"]) == tensor.shape
    assert read["odd_fp8"]["dtype"] == "F8_E4M3" and read["brain"]["dtype"] == "BF16"
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    assert header["__metadata__"] == {"format": "pt"}  # transformers refuses a file without it


def test_tensors_are_read_lazily_and_read_only(tmp_path: Path) -> None:
    write_file(tmp_path / "x.safetensors", sample())
    tensor = SafetensorsFile(tmp_path / "x.safetensors").tensor("wide")
    with pytest.raises(ValueError, match="read-only"):
        tensor[0] = 0


NAMES = {"float8_e4m3fn": "F8_E4M3", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def test_tensors_may_come_in_any_order(tmp_path: Path) -> None:
    tensors = sample()
    described = {name: (tensor.shape, NAMES[tensor.dtype.name]) for name, tensor in tensors.items()}
    with SafetensorsWriter(tmp_path / "x.safetensors", described) as writer:
        for name in reversed(list(tensors)):
            writer.write(name, tensors[name])
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert all(file.tensor(name).tobytes() == tensor.tobytes() for name, tensor in tensors.items())


def test_writer_refuses_what_was_not_announced(tmp_path: Path) -> None:
    def writer(*names: str) -> SafetensorsWriter:
        return SafetensorsWriter(tmp_path / "x.safetensors", dict.fromkeys(names, ((2,), "F32")))

    with pytest.raises(ValueError, match=r"never written: \['b'\]"), writer("a", "b") as partial:
        partial.write("a", np.zeros(2, np.float32))
    for wrong in (np.zeros(3, np.float32), np.zeros(2, np.float16)):
        with pytest.raises(ValueError, match="announced"), writer("a") as strict:
            strict.write("a", wrong)
    with pytest.raises(ValueError, match="announced"), writer("a") as twice:
        twice.write("a", np.zeros(2, np.float32))
        twice.write("a", np.zeros(2, np.float32))


def test_every_truncation_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, sample())
    content = path.read_bytes()
    for size in [0, 5, 8, 20, *range(len(content) - 40, len(content))]:
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"x\.safetensors: truncated: .*\d"):
            SafetensorsFile(path)


def _file(path: Path, header: Any, data: int) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * data)
    return path


def _entry(start: int, stop: int, shape: Any = (1,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"{not json", 0, "corrupt: header is not valid JSON"),
        (b"\xff\xfe{}", 0, "corrupt: header is not valid JSON"),
        ([], 0, "expected an object"),
        ({"a": 3}, 0, "header entry of a"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "header entry of a"),
        ({"a": _entry(0, 4, [-1])}, 4, "header entry of a"),
        ({"a": _entry(0, 4, [1.5])}, 4, "header entry of a"),
        ({"a": _entry(0, 4, dtype="F4")}, 4, "a has dtype 'F4'"),
        ({"a": _entry(0, 8)}, 8, "takes 4 bytes, not 8"),
        ({"a": _entry(0, 4), "b": _entry(0, 4)}, 4, "b starts at byte"),
        ({"a": _entry(4, 8)}, 8, "a starts at byte"),
        ({"a": _entry(0, 4)}, 6, "2 bytes after the last tensor"),
    ],
)
def test_damaged_headers(tmp_path: Path, header: Any, data: int, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        SafetensorsFile(_file(tmp_path / "x.safetensors", header, data))


def test_header_length_of_garbage(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"this is no safetensors file")
    with pytest.raises(CheckpointError, match="corrupt: header of"):
        SafetensorsFile(path)
