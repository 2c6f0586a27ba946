"""Times variants of the kernels: tile sizes, warps, stages, splits, kinds of operands.

`python -m benchmarks.kernels.tune [source ...] [--tiny] [--scale X]`: variants are checked against float64.
Each source has its share of about 190 seconds, times X; none of its variants starts after that, so that a
slow one cannot keep the others from being measured. `--tiny` rehearses on a CPU. One table is printed last.
"""

import argparse
import os
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from benchmarks.kernels import tune_moe, tune_sparse_mla
from benchmarks.kernels.harness import Harness, Variant

# The most that a change of defaults may gain comes first; seconds.
SOURCES = {
    "experts": (tune_moe.expert_variants, 50.0),
    "boundary": (tune_moe.boundary_variants, 25.0),
    "causal": (tune_sparse_mla.causal_variants, 18.0),
    "selection": (tune_sparse_mla.selection_variants, 15.0),
    "sampling": (tune_moe.sampling_variants, 15.0),
    "few": (tune_moe.few_expert_variants, 8.0),
    "scores": (tune_sparse_mla.score_variants, 15.0),
    "matmul": (tune_moe.matmul_variants, 14.0),
    "other": (tune_moe.other_expert_variants, 15.0),
    "glue": (tune_moe.glue_variants, 8.0),
    "attention": (tune_sparse_mla.attention_variants, 10.0),
}


def line(variant: Variant, *, late: bool) -> str:
    """Measures one variant unless it is too late."""
    label = f"{variant.group:32} {variant.name:72}"
    if late:
        return f"{label} not started: out of time"
    try:
        seconds, error = variant.measure()
    except Exception as problem:  # a variant that does not compile is a result too
        return f"{label} {type(problem).__name__}: {str(problem)[:80]!r}"
    return f"{label} {seconds * 1e6:10.1f} us  error {error:.2e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="*", metavar="source", help=f"of {', '.join(SOURCES)}; all without")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--scale", type=float, default=1.0, help="of the seconds that each source has")
    options = parser.parse_args()
    harness = Harness(tiny=options.tiny)
    begun, lines = time.monotonic(), []
    for name in options.sources or SOURCES:
        source, share = SOURCES[name]
        start = time.monotonic()
        for variant in source(harness):
            late = time.monotonic() - start > share * options.scale
            lines.append(line(variant, late=late))
            print(lines[-1], flush=True)
    print(
        f"copy {harness.copy_rate / 1e12:.2f} TB/s, bfloat16 {harness.matmul_rate / 1e12:.0f} TFLOP/s, "
        f"{harness.device}, {time.monotonic() - begun:.0f} s"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
