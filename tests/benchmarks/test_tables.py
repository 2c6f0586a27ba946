"""README's tables are those of the results files, and say so where a target is missed."""

from benchmarks.tables import README, rewritten, table


def test_readme_shows_the_results_files() -> None:
    text = README.read_text(encoding="utf-8")
    assert "<!-- results: " in text
    assert rewritten(text) == text, "run python -m benchmarks.tables"


def test_missed_targets_are_marked() -> None:
    rows = [
        {"name": "a", "value": 2.0, "unit": "ms", "better": "lower", "target": 1.0},
        {"name": "b", "value": 0.5, "unit": "ms", "better": "lower", "target": 1.0},
        {"name": "c", "value": 0.5, "unit": "share", "better": "higher", "target": 1.0},
        {"name": "d", "value": 7.0, "unit": "s", "better": "lower"},
    ]
    marked = [line.split("|")[1].strip() for line in table(rows).splitlines() if "misses" in line]
    assert marked == ["a", "c"]
