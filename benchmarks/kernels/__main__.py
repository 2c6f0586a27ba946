"""Runs the kernels' benchmarks: python -m benchmarks.kernels [--tiny] [module ...]."""

import argparse
import importlib
import os
import pathlib
import traceback
from concurrent.futures import ThreadPoolExecutor

# Torch peers need memory beside jax; read before jax starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from benchmarks.kernels import harness

HERE = pathlib.Path(__file__).parent


def main() -> None:
    found = sorted(
        p.stem for p in HERE.glob("*.py") if "def measure(" in p.read_text() and p.stem != "__main__"
    )
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "modules", nargs="*", metavar="module", help=f"of {', '.join(found)}; all without a name"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes, interpreted: a rehearsal, nothing written"
    )
    options = parser.parse_args()
    if unknown := set(options.modules) - set(found):
        parser.error(f"no benchmark {sorted(unknown)}; there are {found}")
    run = harness.Harness(tiny=options.tiny)
    rows: list[harness.Row] = []
    failed: list[str] = []

    def take(row: harness.Row) -> None:
        """A run that is cut short keeps what it has."""
        rows.append(row)
        print(harness.table([row]).splitlines()[-1], flush=True)
        if not options.tiny:
            harness.write(rows, "kernels")

    run.takers.append(take)
    run.rates()

    def measure(name: str) -> None:
        try:
            with run.alone():
                importlib.import_module(f"benchmarks.kernels.{name}").measure(run)
        except Exception:  # one kernel's failure must not cost the others' measurements
            traceback.print_exc()
            failed.append(name)

    # Modules compile beside one another; `alone` lets one at a time on the device.
    with ThreadPoolExecutor(len(found)) as pool:
        list(pool.map(measure, options.modules or found))
    print(harness.table(rows))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
