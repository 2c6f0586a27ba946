"""Compile every registered kernel for GPUs on a machine that has none.

A `cases_<op>.py` beside this file lists an op's shipped configurations. Each is lowered for its platform, its
Triton IR goes through the passes that XLA applies too and is compiled by PyPI's `triton` wheel: for MI355X
(gfx950) and MI300X (gfx942), or for H200 (sm_90) when asked. Registers, spills, shared memory and matrix
instructions are read from the result. XLA ships a Triton of its own, so this is a close proxy, not the binary
that runs.

    python -m tests.amd.gate [--only NAME] [--chip gfx950|gfx942|sm_90] [--write PATH]

prints the table and exits non-zero when a kernel spills, has a dot without matrix instructions, or needs more
shared memory than the chip has. The IR is taken by wrapping one private function of jax 0.10.2, which the
`amd` environment therefore pins.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax

AMD_CHIPS = ("gfx950", "gfx942")
SHARED_LIMITS = {"gfx950": 160 * 1024, "gfx942": 64 * 1024, "sm_90": 227 * 1024}


@dataclasses.dataclass(frozen=True)
class Case:
    """One shipped configuration of an op: the call to lower and which of its kernels hold dots."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # pytrees of jax.ShapeDtypeStruct
    dots: tuple[str, ...] = ()  # kernel names that must use matrix instructions
    chips: tuple[str, ...] = AMD_CHIPS


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
    spills: int  # registers on AMD, bytes of stack a thread on NVIDIA
    shared: int
    matrix: str  # matrix instructions, by kind where there are several
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


def lower(case: Case, platform: str = "rocm") -> list[Kernel]:
    """The case's kernels as lowered for ROCm or CUDA."""
    with _captured_ir() as captured:
        lowered = jax.jit(case.function).trace(*case.arguments).lower(lowering_platforms=(platform,))
    launches = re.findall(r'name = "(\w+)", num_stages = (\d+) : i32, num_warps = (\d+)', lowered.as_text())
    # Launches of one name, as those of a kernel that is applied to its own result, come in the same order.
    by_name = collections.defaultdict(list)
    for name, stages, warps in launches:
        by_name[name].append((int(warps), int(stages)))
    return [Kernel(name, text, *by_name[name].pop(0)) for name, text in captured]


def compile_for(kernel: Kernel, chip: str, *, case: str = "", dots: bool = False) -> Row:
    """Compile one kernel for one chip and read what the binary says."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as triton_compile

    nvidia = chip.startswith("sm_")
    target = GPUTarget("cuda", int(chip[3:]), 32) if nvidia else GPUTarget("hip", chip, 64)
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / f"{kernel.name}.ttir"
        path.write_text(kernel.text)
        path.write_text(_simplify(path, target, options))
        compiled = triton_compile(str(path), target=target, options=options)
    read = _read_nvidia if nvidia else _read_amd
    registers, spills, matrix, faults = read(compiled.asm)
    if dots and not matrix:
        faults.append("dots without matrix instructions")
    if compiled.metadata.shared > SHARED_LIMITS[chip]:
        faults.append(f"shared memory {compiled.metadata.shared} above {SHARED_LIMITS[chip]}")
    return Row(
        case=case,
        kernel=kernel.name,
        chip=chip,
        warps=kernel.num_warps,
        registers=registers,
        spills=spills,
        shared=compiled.metadata.shared,
        matrix=matrix,
        faults=tuple(faults),
    )


def _simplify(path: pathlib.Path, target: Any, options: dict[str, int]) -> str:
    """The IR after the passes before layouts are chosen, which `triton.compile` skips for a file: without
    them a sum into a dot's result stays apart from the dot and doubles its registers."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import Language
    from triton.compiler import make_backend

    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = ir.parse_mlir_module(str(path), context)
    module.context = context
    stages: dict[str, Callable[..., Any]] = {}
    backend.add_stages(stages, backend.parse_options(options), Language.TRITON)
    return str(stages["ttir"](module, {}))


def _read_amd(binary: dict[str, Any]) -> tuple[int, int, str, list[str]]:
    """Registers, spills, matrix instructions and faults."""
    assembly = binary["amdgcn"]

    def read(field: str) -> int:
        return int(re.search(rf"\.{field}:\s+(\d+)", assembly)[1])

    # vgpr_count already contains the accumulation registers of these chips' unified file.
    spills, scratch = read("vgpr_spill_count") + read("sgpr_spill_count"), read("private_segment_fixed_size")
    faults = [f"spills {spills}, scratch {scratch} bytes"] if spills or scratch else []
    mfma = len(re.findall(r"\bv_s?mfma", assembly))
    return read("vgpr_count"), spills, str(mfma or ""), faults


def _read_nvidia(binary: dict[str, Any]) -> tuple[int, int, str, list[str]]:
    """As `_read_amd`: HGMMA and QGMMA are a warp group's products in 16 and 8 bits, HMMA a single warp's."""
    import triton

    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary["cubin"])
        file.flush()
        usage, assembly = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("--dump-resource-usage", "--dump-sass")
        )
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    products = collections.Counter(re.findall(r"\b([HQ]GMMA|HMMA|IMMA)\b", assembly))
    matrix = ", ".join(f"{name} {count}" for name, count in sorted(products.items()))
    return registers, stack, matrix, [f"stack {stack} bytes"] if stack else []


def check(case: Case, chips: tuple[str, ...] = ()) -> list[Row]:
    """Rows of all kernels of a case on the chips, by default all of its own."""
    rows = []
    chips = chips or case.chips
    for platform, of_platform in (
        ("rocm", [chip for chip in chips if chip in AMD_CHIPS]),
        ("cuda", [chip for chip in chips if chip not in AMD_CHIPS]),
    ):
        for kernel in lower(case, platform) if of_platform else ():
            for chip in of_platform:
                rows.append(compile_for(kernel, chip, case=case.name, dots=kernel.name in case.dots))
    missing = set(case.dots) - {row.kernel for row in rows}
    if missing:
        raise ValueError(f"case {case.name} names kernels that it does not launch: {sorted(missing)}")
    return rows


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    header = "| case | kernel | chip | warps | registers | spills | shared | matrix | |\n" + "|---" * 9 + "|"
    lines = [
        f"| {r.case} | {r.kernel} | {r.chip} | {r.warps} | {r.registers} | {r.spills} | {r.shared} "
        f"| {r.matrix} | {'; '.join(r.faults) or 'ok'} |"
        for r in rows
    ]
    return "\n".join([header, *lines])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="compile the cases whose name contains this")
    parser.add_argument("--chip", choices=SHARED_LIMITS, action="append", help="instead of both AMD chips")
    parser.add_argument("--write", type=pathlib.Path, help="write the rows as JSON too")
    arguments = parser.parse_args()
    chips = tuple(arguments.chip or ())
    rows = [row for case in cases() if arguments.only in case.name for row in check(case, chips)]
    print(table(rows))
    if arguments.write:
        arguments.write.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    return int(any(row.faults for row in rows))


if __name__ == "__main__":
    sys.exit(main())
