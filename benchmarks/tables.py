"""Writes README's tables of results from benchmarks/results: `python -m benchmarks.tables`.

A table stands between `<!-- results: PATTERN -->` and `<!-- end of results -->`, where PATTERN names files in
benchmarks/results without their ending; every row of every matching file is in it, missed targets too.
"""

import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent
README = HERE.parent / "README.md"
SECTION = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
COLUMNS = ("name", "value", "unit", "target", "floor", "peer", "peer_value", "error", "device", "date")


def rows(pattern: str) -> list[dict]:
    found = sorted((HERE / "results").glob(f"{pattern}.json"))
    return [row for path in found for row in json.loads(path.read_text())]


def table(results: list[dict]) -> str:
    """Markdown, with the columns that any row has; a value that misses its target is marked."""
    if not results:
        return "No results yet.\n"
    columns = [column for column in COLUMNS if any(column in row for row in results)]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in results:
        cells = [_cell(row, column) for column in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: dict, column: str) -> str:
    value = row.get(column, "")
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    if column == "value" and "target" in row:
        missed = value > row["target"] if row.get("better") == "lower" else value < row["target"]
        return f"**{text} (misses its target)**" if missed else text
    return text


def rewritten(text: str) -> str:
    """The README with every table made anew."""
    return SECTION.sub(lambda m: m[1] + table(rows(m[2])) + m[3], text)


def main() -> None:
    before = README.read_text(encoding="utf-8")
    after = rewritten(before)
    if "--check" in sys.argv and before != after:
        sys.exit("README's tables are not those of benchmarks/results: run python -m benchmarks.tables")
    README.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
