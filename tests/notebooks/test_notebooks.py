"""Notebooks run from top to bottom, and what they show is stored with them, small."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_BYTES = 600_000
MOST_SECONDS_A_CELL = 900  # two idle cores need one minute for the longest; a busy machine several


def figures(notebook: nbformat.NotebookNode) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_the_notebooks_are_found() -> None:
    assert "01_inside_the_model.ipynb" in [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_stored_outputs_are_whole_and_small(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), (
        "run it from a fresh kernel"
    )
    assert figures(notebook) >= 6
    assert path.stat().st_size < MOST_BYTES
    # warnings, and paths of the machine it ran on, do not belong in it
    streams = [out for cell in code for out in cell.outputs if out.output_type in ("stream", "error")]
    assert all(out.get("name") == "stdout" for out in streams)
    assert not any(re.search(r"/(home|root|usr|Users|tmp)/", out.text) for out in streams)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_draws_what_is_stored(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    stored = figures(notebook)
    client = NotebookClient(
        notebook, timeout=MOST_SECONDS_A_CELL, resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()  # raises CellExecutionError where a cell does, its assertions among them
    assert figures(notebook) == stored
