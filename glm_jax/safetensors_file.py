"""Reader and writer of single safetensors files, float8_e4m3fn included.

The published reader cannot hand e4m3 to numpy, so the format is read directly: 8 bytes of little-endian
header length, a JSON header `{name: {"dtype", "shape", "data_offsets"}}`, then the data. Tensors are views of
a memory map.
"""

import dataclasses
import functools
import json
import math
import mmap
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "BOOL": np.dtype(np.bool_),
    **{f"{kind}{bits}": np.dtype(f"{kind.lower()}{bits // 8}") for kind in "IU" for bits in (8, 16, 32, 64)},
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # the format's own bound, so that garbage is not read as a huge header
_METADATA = "__metadata__"


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message names the file or lists every tensor that is wrong."""


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: dtype name of the format, shape, and its byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """A checked, memory-mapped safetensors file; `entries` has its tensors in file order.

    Raises:
        CheckpointError: the file is truncated, corrupt, or holds an unknown dtype.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = _read_header(path)

    @functools.cached_property
    def _map(self) -> mmap.mmap:
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def tensor(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the file; nothing is read until it is used."""
        entry = self.entries[name]
        if entry.start == entry.stop:
            return np.empty(entry.shape, DTYPES[entry.dtype])
        content = np.frombuffer(self._map, np.uint8, entry.stop - entry.start, entry.start)
        return content.view(DTYPES[entry.dtype]).reshape(entry.shape)

    def release(self) -> None:
        """Gives back the memory of pages read so far; views stay valid and read them again."""
        if "_map" in self.__dict__ and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def _read_header(path: Path) -> dict[str, TensorEntry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path}: truncated: {size} bytes, a safetensors file has at least 8")
        (length,) = struct.unpack("<Q", prefix)
        if length > _LONGEST_HEADER:
            raise CheckpointError(f"{path}: corrupt: header of {length} bytes, at most {_LONGEST_HEADER}")
        if 8 + length > size:
            raise CheckpointError(f"{path}: truncated: header ends at byte {8 + length}, file has {size}")
        text = file.read(length)
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError(f"expected an object, found {type(header).__name__}")
    except ValueError as error:
        raise CheckpointError(f"{path}: corrupt: header is not valid JSON: {error}") from error
    header.pop(_METADATA, None)
    data = 8 + length
    entries = {name: _entry(path, name, fields, data) for name, fields in header.items()}
    end = data
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise CheckpointError(f"{path}: corrupt: {name} starts at byte {entry.start}, expected {end}")
        end = entry.stop
    if size < end:
        raise CheckpointError(f"{path}: truncated: tensor data ends at byte {end}, file has {size}")
    if size > end:
        raise CheckpointError(f"{path}: corrupt: {size - end} bytes after the last tensor")
    return entries


def _entry(path: Path, name: str, fields: Any, data: int) -> TensorEntry:
    try:
        dtype, shape = fields["dtype"], tuple(fields["shape"])
        start, stop = fields["data_offsets"]
        numbers = (*shape, start, stop)
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: corrupt: header entry of {name}: {fields!r}") from error
    if any(not isinstance(number, int) or isinstance(number, bool) or number < 0 for number in numbers):
        raise CheckpointError(f"{path}: corrupt: header entry of {name}: {fields!r}")
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name} has dtype {dtype!r}; supported: {sorted(DTYPES)}")
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if stop - start != expected:
        raise CheckpointError(
            f"{path}: corrupt: {name} of {dtype} {list(shape)} takes {expected} bytes, not {stop - start}"
        )
    return TensorEntry(dtype, shape, data + start, data + stop)


class SafetensorsWriter:
    """Writes one file whose tensors are known beforehand and arrive in any order, each once.

    Use as a context manager; leaving it normally checks that every tensor was written.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        """`tensors` is `{name: (shape, dtype name)}`."""
        self.path = path
        self._entries: dict[str, TensorEntry] = {}
        header: dict[str, Any] = {_METADATA: {"format": "pt"}}
        position = 0
        # Wide types first: every tensor then starts at a multiple of its own item size.
        for name in sorted(tensors, key=lambda name: -DTYPES[tensors[name][1]].itemsize):
            shape, dtype = tensors[name]
            stop = position + math.prod(shape) * DTYPES[dtype].itemsize
            self._entries[name] = TensorEntry(dtype, tuple(shape), position, stop)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, stop]}
            position = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        self._header = text + b" " * (-len(text) % 8)
        self._missing = set(tensors)
        self._file: BinaryIO | None = None

    def __enter__(self) -> "SafetensorsWriter":
        self._file = self.path.open("wb")
        self._file.write(struct.pack("<Q", len(self._header)) + self._header)
        return self

    def write(self, name: str, tensor: np.ndarray) -> None:
        """Writes one tensor of exactly the announced shape and dtype."""
        entry = self._entries[name]
        found = (DTYPE_NAMES.get(tensor.dtype), tensor.shape)
        if found != (entry.dtype, entry.shape) or name not in self._missing:
            raise ValueError(
                f"{name}: announced once as {entry.dtype} {entry.shape}, got {found[0]} {found[1]}"
            )
        assert self._file is not None
        self._file.seek(8 + len(self._header) + entry.start)
        self._file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
        self._missing.remove(name)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._file is not None
        self._file.close()
        if kind is None and self._missing:
            raise ValueError(f"{self.path}: never written: {sorted(self._missing)}")


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes arrays that are all at hand."""
    described = {name: (tensor.shape, DTYPE_NAMES[tensor.dtype]) for name, tensor in tensors.items()}
    with SafetensorsWriter(path, described) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def listed(lines: Iterable[str]) -> str:
    """Lines of a multi-part message, indented."""
    return "".join(f"\n  {line}" for line in lines)
