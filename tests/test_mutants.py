"""The table of mutants.py fits the code: each text is there once, each test exists.

The mutants themselves take minutes: ``python tests/mutants.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants_table import MUTANTS, Mutant

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("mutant", MUTANTS, ids=[m.name for m in MUTANTS])
def test_its_text_is_found_once_and_its_tests_exist(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1 and mutant.new != mutant.old
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).exists(), test


def test_names_are_unique() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
