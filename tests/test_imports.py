"""Imports point one way: pallas_kernels <- glm_jax <- offload <- serving, and the product needs no torch."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pallas_kernels", "glm_jax", "offload", "serving")
# Two doors look up the table, inside function bodies only: the command line and offline generation.
DOORS = {"glm_jax/serve.py", "glm_jax/offline.py"}
FORBIDDEN = {"torch", "transformers", "jax_triton", "tokamax"}


def imported_names(tree: ast.AST) -> list[tuple[str, bool]]:
    """Top-level names of all imports in a module, each with whether it stands inside a function body."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name.split(".")[0], inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append((node.module.split(".")[0], inside))
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(tree, False)
    return found


def violations(path: str, source: str) -> list[str]:
    """What in the module at `path` (relative to the root) breaks the import rules."""
    rank = PACKAGES.index(path.split("/")[0])
    problems = []
    for name, inside in imported_names(ast.parse(source)):
        if name in FORBIDDEN:
            problems.append(f"{path} imports {name}")
        elif name in PACKAGES and PACKAGES.index(name) > rank and not (inside and path in DOORS):
            problems.append(f"{path} imports {name}, which lies above it")
    return problems


def test_every_module_imports_downwards() -> None:
    checked, problems = 0, []
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            checked += 1
            problems += violations(file.relative_to(ROOT).as_posix(), file.read_text())
    assert checked > 20
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("path", "source", "bad"),
    [
        ("glm_jax/model.py", "import serving", True),
        ("glm_jax/model.py", "def f():\n    from serving.engine import Engine", True),
        ("glm_jax/offline.py", "from serving import Engine", True),
        ("glm_jax/offline.py", "def f():\n    from serving import Engine", False),
        ("glm_jax/serve.py", "if True:\n    import serving.api", True),
        ("pallas_kernels/kda.py", "from glm_jax.config import Config", True),
        ("offload/tiers.py", "import serving", True),
        ("serving/engine.py", "import glm_jax, offload", False),
        ("serving/engine.py", "def f():\n    import torch", True),
        ("glm_jax/a.py", "from . import serve", False),
    ],
)
def test_the_rule_itself(path: str, source: str, bad: bool) -> None:
    assert bool(violations(path, source)) is bad
