"""Compile every registered kernel for AMD GPUs on a machine that has none.

A `cases_<op>.py` beside this file lists an op's shipped configurations. Each is lowered for platform `rocm`,
its Triton IR is compiled by PyPI's `triton` wheel for MI355X (gfx950) and MI300X (gfx942), and registers,
spills, LDS and matrix instructions are read from the result. XLA ships a Triton of its own, so this is a
close proxy, not the binary that runs.

    python -m tests.amd.gate [--only NAME] [--write PATH]

prints the table and exits non-zero when a kernel spills, has a dot without matrix instructions, or needs more
LDS than the chip has. The IR is taken by wrapping one private function of jax 0.10.2, which the `amd`
environment therefore pins.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax

LDS_LIMITS = {"gfx950": 160 * 1024, "gfx942": 64 * 1024}


@dataclasses.dataclass(frozen=True)
class Case:
    """One shipped configuration of an op: the call to lower and which of its kernels hold dots."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # pytrees of jax.ShapeDtypeStruct
    dots: tuple[str, ...] = ()  # kernel names that must use matrix instructions
    chips: tuple[str, ...] = tuple(LDS_LIMITS)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One lowered kernel: its Triton IR and launch parameters."""

    name: str
    text: str
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    case: str
    kernel: str
    chip: str
    warps: int
    registers: int
    spills: int
    lds: int
    mfma: int
    faults: tuple[str, ...]


def cases() -> list[Case]:
    """All cases of the `cases_*.py` modules beside this file, each of which defines `cases()`."""
    found: list[Case] = []
    for path in sorted(pathlib.Path(__file__).parent.glob("cases_*.py")):
        found += importlib.import_module(f"tests.amd.{path.stem}").cases()
    return found


@contextlib.contextmanager
def _captured_ir() -> Iterator[list[tuple[str, str]]]:
    """(name, Triton IR text) of every Pallas kernel lowered inside the block."""
    lowering = importlib.import_module("jax._src.pallas.triton.lowering")
    original = lowering.lower_jaxpr_to_triton_module
    captured: list[tuple[str, str]] = []

    def capture(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        text = result.module.operation.get_asm(enable_debug_info=False)
        captured.append((re.search(r"tt\.func public @(\w+)", text)[1], text))
        return result

    lowering.lower_jaxpr_to_triton_module = capture
    try:
        yield captured
    finally:
        lowering.lower_jaxpr_to_triton_module = original


def lower(case: Case) -> list[Kernel]:
    """The case's kernels as lowered for ROCm."""
    with _captured_ir() as captured:
        lowered = jax.jit(case.function).trace(*case.arguments).lower(lowering_platforms=("rocm",))
    launches = re.findall(r'name = "(\w+)", num_stages = (\d+) : i32, num_warps = (\d+)', lowered.as_text())
    by_name = {name: (int(warps), int(stages)) for name, stages, warps in launches}
    return [Kernel(name, text, *by_name[name]) for name, text in captured]


def compile_for(kernel: Kernel, chip: str, *, case: str = "", dots: bool = False) -> Row:
    """Compile one kernel for one chip and read what the assembly says."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as triton_compile

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / f"{kernel.name}.ttir"
        path.write_text(kernel.text)
        options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages}
        compiled = triton_compile(str(path), target=GPUTarget("hip", chip, 64), options=options)
    assembly = compiled.asm["amdgcn"]

    def read(field: str) -> int:
        return int(re.search(rf"\.{field}:\s+(\d+)", assembly)[1])

    # vgpr_count already contains the accumulation registers of these chips' unified file.
    spills = read("vgpr_spill_count") + read("sgpr_spill_count")
    mfma = len(re.findall(r"\bv_s?mfma", assembly))
    faults = []
    if spills or read("private_segment_fixed_size"):
        faults.append(f"spills {spills}, scratch {read('private_segment_fixed_size')} bytes")
    if dots and not mfma:
        faults.append("dots without matrix instructions")
    if compiled.metadata.shared > LDS_LIMITS[chip]:
        faults.append(f"LDS {compiled.metadata.shared} above {LDS_LIMITS[chip]}")
    return Row(
        case=case,
        kernel=kernel.name,
        chip=chip,
        warps=kernel.num_warps,
        registers=read("vgpr_count"),
        spills=spills,
        lds=compiled.metadata.shared,
        mfma=mfma,
        faults=tuple(faults),
    )


def check(case: Case) -> list[Row]:
    """Rows of all kernels of a case on all its chips."""
    rows = []
    for kernel in lower(case):
        for chip in case.chips:
            rows.append(compile_for(kernel, chip, case=case.name, dots=kernel.name in case.dots))
    missing = set(case.dots) - {row.kernel for row in rows}
    if missing:
        raise ValueError(f"case {case.name} names kernels that it does not launch: {sorted(missing)}")
    return rows


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    header = "| case | kernel | chip | waves | VGPRs | spills | LDS bytes | MFMA | |\n" + "|---" * 9 + "|"
    lines = [
        f"| {r.case} | {r.kernel} | {r.chip} | {r.warps} | {r.registers} | {r.spills} | {r.lds} | {r.mfma} "
        f"| {'; '.join(r.faults) or 'ok'} |"
        for r in rows
    ]
    return "\n".join([header, *lines])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="compile the cases whose name contains this")
    parser.add_argument("--write", type=pathlib.Path, help="write the rows as JSON too")
    arguments = parser.parse_args()
    rows = [row for case in cases() if arguments.only in case.name for row in check(case)]
    print(table(rows))
    if arguments.write:
        arguments.write.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    return int(any(row.faults for row in rows))


if __name__ == "__main__":
    sys.exit(main())
