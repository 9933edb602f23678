"""docs/rules.md is complete: every rule, every test that carries a rule's number, and no test that does not exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
COUNTS = {
    "N": 8,
    "R": 7,
    "A": 5,
    "L": 5,
    "G": 4,
    "S": 5,
    "C": 4,
    "D": 5,
    "P": 3,
    "M": 3,
    "T": 2,
    "I": 1,
    "E": 2,
    "B": 2,
}
COUNTS |= {"F": 2, "Y": 2}
RULES = {f"{letter}{i}" for letter, count in COUNTS.items() for i in range(1, count + 1)}


def rows() -> dict[str, list[str]]:
    """The cells of every rule of the page."""
    lines = (HERE.parent / "docs" / "rules.md").read_text().splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if re.match(r"\| [A-Z]\d \|", line)]
    assert len({row[0] for row in cells}) == len(cells), "a rule has two rows"
    return {row[0]: row[1:] for row in cells}


def all_tests() -> set[str]:
    """The names of all tests in this folder, those that exist only with a GPU included."""
    trees = [ast.walk(ast.parse(path.read_text())) for path in HERE.glob("test_*.py")]
    return {n.name for tree in trees for n in tree if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}


def test_every_rule_has_a_row_with_a_sentence_a_place_and_a_proof() -> None:
    found = rows()
    assert set(found) == RULES
    for rule, cells in found.items():
        assert len(cells) == 3 and all(len(cell) > 3 for cell in cells) and cells[0].endswith("."), rule


def test_every_named_test_exists() -> None:
    named = {name for cells in rows().values() for name in re.findall(r"`(test_\w+)`", cells[2])}
    assert not named - all_tests()


def test_every_test_with_a_number_stands_in_the_row_of_its_rule() -> None:
    found, numbered = rows(), 0
    for name in all_tests():
        prefix = re.match(r"test_((?:[a-z]\d_)+)", name)
        for rule in prefix.group(1).upper().split("_")[:-1] if prefix else []:
            numbered += 1
            assert f"`{name}`" in found[rule][2], f"{name} is missing in the row of {rule}"
    assert numbered > len(RULES)


def test_every_rule_that_a_cpu_can_show_has_a_test_with_its_number() -> None:
    elsewhere = {"B1", "B2", "F1", "F2"}  # shown by tests of other names, or by measurement
    carried = {
        r for n in all_tests() if (m := re.match(r"test_((?:[a-z]\d_)+)", n)) for r in m.group(1).upper().split("_")
    }
    assert RULES - elsewhere <= carried


def test_every_place_exists() -> None:
    package = HERE.parent / "python" / "mxfp4_ops"
    for rule, cells in rows().items():
        for place in re.findall(r"`([\w./]+)`", cells[1]):
            assert (package / place).exists() or (HERE.parent / place).exists(), (rule, place)
