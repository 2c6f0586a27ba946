"""Measures time on the device, the device's own rates, and peers; makes the rows of a results file.

A kernel's time is how much longer a program of many dependent repeats takes than one of a single repeat:
neither launch nor Python is in it. The latter's time, from Python to its end, is the call's. Floors come from
the copy bandwidth and the matrix-product rate of the same run.
"""

import contextlib
import dataclasses
import datetime
import functools
import json
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Row = dict[str, Any]
RESULTS = pathlib.Path(__file__).resolve().parent.parent / "results"
_COLUMNS = ("name", "value", "unit", "call", "floor", "target", "peer", "peer_value", "error")


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run an op: tile sizes and the like in its name."""

    group: str
    name: str
    measure: Callable[[], tuple[float, float]]  # seconds, error


class Harness:
    """One run on one device. `tiny` shrinks every shape and interprets the kernels: a rehearsal on a CPU."""

    def __init__(self, tiny: bool = False):
        self.tiny = tiny
        self.implementation = "interpret" if tiny else "triton"
        self.device = jax.devices()[0].device_kind
        self.trials = 1 if tiny else 10
        self.takers: list[Callable[[Row], None]] = []  # called with every row as it is made
        self._alone = threading.Lock()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Holds the device for one measuring thread; only compilations of others go on meanwhile."""
        with self._alone:
            yield

    def compiled(self, function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
        """`function`, jitted and compiled for the arguments; other threads measure meanwhile."""
        lowered = jax.jit(function).lower(*arguments)
        held = self._alone.locked()
        if held:
            self._alone.release()
        try:
            return lowered.compile()
        finally:
            if held:
                self._alone.acquire()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(*arguments)`, compiled as a whole."""
        return self.compiled(function, *arguments)(*arguments)

    def size(self, full: int, tiny: int) -> int:
        """A dimension of the released model, or a small one in a rehearsal."""
        return tiny if self.tiny else full

    @functools.cached_property
    def launch_s(self) -> float:
        """Seconds from calling an empty program to its end."""
        empty = jax.jit(lambda x: x + 1)
        return self._best(lambda: empty(jnp.zeros(())).block_until_ready(), 20)

    def seconds(self, step: Callable[..., Any], carry: Any, *constants: Any, repeats: int = 10) -> float:
        """Device seconds of `carry = step(carry, *constants)`; carry keeps its shapes and dtypes."""
        return self.timing(step, carry, *constants, repeats=repeats)[0]

    def timing(
        self, step: Callable[..., Any], carry: Any, *constants: Any, repeats: int = 10
    ) -> tuple[float, float]:
        """(Device seconds of `carry = step(carry, *constants)`, seconds of one call from Python)."""
        lengths = (1, 2) if self.tiny else (1, 1 + repeats)
        short, long = (self._chain_seconds(step, n, carry, *constants) for n in lengths)
        return max(long - short, 0.0) / (lengths[1] - 1), short

    def _chain_seconds(self, step: Callable[..., Any], length: int, carry: Any, *constants: Any) -> float:
        def chain(carry: Any, *constants: Any) -> Any:
            for _ in range(length):
                # the barrier keeps XLA from fusing repeats: ten doublings of an array became one pass
                carry = jax.lax.optimization_barrier(step(carry, *constants))
            return carry

        run = self.compiled(chain, carry, *constants)
        return self._best(lambda: jax.block_until_ready(run(carry, *constants)), self.trials)

    def _best(self, call: Callable[[], Any], trials: int) -> float:
        call()
        times = []
        for _ in range(trials):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    @functools.cached_property
    def copy_rate(self) -> float:
        """Bytes read and written a second by the fastest of several copies."""
        rates = []
        for mebibytes in (1,) if self.tiny else (512, 2048):
            size = mebibytes * 2**20
            x = jnp.ones(size // 4)
            # in place: straight-line copies into new memory reached 3.2 TB/s where a loop's reached 4.1
            loop = lambda x: jax.lax.fori_loop(0, 4, lambda _, x: x * 1.0001, x)  # noqa: E731
            rates += [
                2 * size / max(self.seconds(step, x) / n, 1e-9) for step, n in ((jnp.negative, 1), (loop, 4))
            ]
        return max(rates)

    @functools.cached_property
    def matmul_rate(self) -> float:
        """FLOP a second of the fastest of several bfloat16 matrix products on random data."""
        rates = []
        for n in (64,) if self.tiny else (4096, 8192):
            x, w = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) * n**-0.5 for i in range(2))
            rates.append(2 * n**3 / max(self.seconds(lambda x, w: x @ w, x, w), 1e-9))
        return max(rates)

    def floor(self, *, bytes_moved: float = 0, flop: float = 0) -> float:
        """The least seconds for so many bytes through memory and so many FLOP, at this run's rates."""
        return max(bytes_moved / self.copy_rate, flop / self.matmul_rate)

    def torch_seconds(self, function: Callable[[Any], Callable[[], Any]]) -> float | None:
        """Device seconds of a torch peer under a CUDA graph, or None without torch on a GPU.

        `function(torch)` sets up and returns the call to measure.
        """
        try:
            import torch
        except ImportError:
            return None
        if self.tiny or not torch.cuda.is_available():
            return None
        call = function(torch)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(5):
                call()
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 5e3)
        return min(times)

    def row(
        self,
        name: str,
        value: float,
        *,
        unit: str = "us",
        better: str = "lower",
        call: float | None = None,
        floor: float | None = None,
        target: float | None = None,
        peer: str | None = None,
        peer_value: float | None = None,
        error: float | None = None,
    ) -> Row:
        """One row of a results file; what is None is left out. Times are given in `unit`, like all values."""
        if peer_value is None:
            peer = None
        row = {"name": name, "value": value, "unit": unit, "better": better, "call": call, "floor": floor}
        row |= {"target": target, "peer": peer, "peer_value": peer_value, "error": error}
        row |= {"device": self.device, "jax": jax.__version__, "date": datetime.date.today().isoformat()}
        kept = {
            key: float(f"{v:.5g}") if isinstance(v, float) else v for key, v in row.items() if v is not None
        }
        for take in self.takers:
            take(kept)
        return kept

    def rates(self) -> list[Row]:
        return [
            self.row("device copy", self.copy_rate / 1e12, unit="TB/s", better="higher"),
            self.row("bfloat16 matrix product", self.matmul_rate / 1e12, unit="TFLOP/s", better="higher"),
            self.row("launch of an empty program", self.launch_s * 1e6),
        ]


def relative_error(actual: Any, expected: np.ndarray) -> float:
    """Root mean square of the difference over that of the expected values, in float64."""
    actual = np.asarray(jnp.asarray(actual).astype(jnp.float32), np.float64)
    return float(np.sqrt(((actual - expected) ** 2).mean() / (expected**2).mean()))


def write(rows: list[Row], script: str, folder: pathlib.Path = RESULTS) -> pathlib.Path:
    """Writes <script>-<device>.json; rows of the same name from an earlier run are replaced, others stay."""
    device = re.sub(r"[^a-z0-9]+", "-", rows[0]["device"].lower()).strip("-")
    path = folder / f"{script}-{device}.json"
    folder.mkdir(parents=True, exist_ok=True)
    earlier = json.loads(path.read_text()) if path.exists() else []
    names = {row["name"] for row in rows}
    kept = [row for row in earlier if row["name"] not in names]
    lines = ",\n ".join(json.dumps(row) for row in kept + rows)
    path.write_text(f"[{lines}]\n")
    return path


def table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    cells = [[_text(row.get(column, "")) for column in _COLUMNS] for row in rows]
    cells.insert(0, list(_COLUMNS))
    widths = [max(len(row[i]) for row in cells) for i in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
