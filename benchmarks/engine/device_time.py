"""Time that a GPU spends in kernels, from a profile."""

import pathlib
import tempfile
from collections import Counter
from collections.abc import Callable

import jax


def kernel_seconds(call: Callable[[], None]) -> tuple[float, Counter[str]]:
    """Seconds of all kernels that `call` (which waits for its end) runs, and seconds by kernel name.

    Kernels of one stream do not overlap, so their sum is the device's busy time. Zero where the profiler
    shows no GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        found = next(pathlib.Path(folder).rglob("*.xplane.pb"), None)
        by_name: Counter[str] = Counter()
        if found is None:
            return 0.0, by_name
        data = jax.profiler.ProfileData.from_file(str(found))
        for plane in data.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if "Stream" not in line.name:
                    continue
                for event in line.events:
                    by_name[event.name] += event.duration_ns * 1e-9
        return sum(by_name.values()), by_name
