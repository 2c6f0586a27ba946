"""docs/ENGINE.md names tests that exist, and every rule's."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "ENGINE.md").read_text()


def test_every_test_and_file_named_is_there() -> None:
    cited = re.findall(r"`((?:tests|serving|benchmarks|glm_jax)/[\w/]+\.py)(?:::(\w+))?`", DOCUMENT)
    assert len([name for _, name in cited if name]) > 60
    for file, name in cited:
        assert (ROOT / file).is_file(), file
        if name:
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"


def test_every_rule_has_its_row() -> None:
    assert re.findall(r"^\| (\d+)\. ", DOCUMENT, re.MULTILINE) == [str(rule) for rule in range(1, 11)]
