"""Times variants of the kernels: tile sizes, warps, stages, splits, kinds of operands.

`python -m benchmarks.kernels.tune [source ...] [--tiny] [--seconds X]`: variants are checked against float64.
Several compile while one is measured; none starts after `--seconds`. `--tiny` rehearses on a CPU. One table,
in order, is printed last.
"""

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from benchmarks.kernels import tune_moe, tune_sparse_mla
from benchmarks.kernels.harness import Harness, Variant

AT_ONCE = 8  # variants in work, one of them on the device
# The most that a change of defaults may gain comes first.
SOURCES = {
    "experts": tune_moe.expert_variants,
    "attention": tune_sparse_mla.attention_variants,
    "boundary": tune_moe.boundary_variants,
    "causal": tune_sparse_mla.causal_variants,
    "matmul": tune_moe.matmul_variants,
    "scores": tune_sparse_mla.score_variants,
    "few": tune_moe.few_expert_variants,
    "other": tune_moe.other_expert_variants,
    "selection": tune_sparse_mla.selection_variants,
    "sampling": tune_moe.sampling_variants,
    "glue": tune_moe.glue_variants,
}


def line(harness: Harness, variant: Variant, until: float) -> str:
    """Measures one variant unless it is too late."""
    label = f"{variant.group:32} {variant.name:72}"
    if time.monotonic() > until:
        return f"{label} not started: out of time"
    try:
        with harness.alone():
            seconds, error = variant.measure()
    except Exception as problem:  # a variant that does not compile is a result too
        found = f"{label} {type(problem).__name__}: {str(problem)[:80]!r}"
    else:
        found = f"{label} {seconds * 1e6:10.1f} us  error {error:.2e}"
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="*", metavar="source", help=f"of {', '.join(SOURCES)}; all without")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=200.0, help="after which no variant starts")
    options = parser.parse_args()
    harness = Harness(tiny=options.tiny)
    begun = time.monotonic()
    rates = f"copy {harness.copy_rate / 1e12:.2f} TB/s, bfloat16 {harness.matmul_rate / 1e12:.0f} TFLOP/s"
    until = begun + options.seconds
    with ThreadPoolExecutor(AT_ONCE) as pool:
        waiting = [
            pool.submit(line, harness, variant, until)
            for name in options.sources or SOURCES
            for variant in SOURCES[name](harness)
        ]
        lines = [each.result() for each in waiting]
    print(f"{rates}, {harness.device}, {time.monotonic() - begun:.0f} s")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
