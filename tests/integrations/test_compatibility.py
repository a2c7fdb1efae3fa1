"""The page of what can be combined: every row names a test that exists, or says that nothing was run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hf_dcp.integrations.versions import OLDEST
from tests.integrations.families import EXACT
from tests.integrations.names import exists, functions
from tests.integrations.parallel_forms import FORMS

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def rows_of_tables() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_row_names_a_test_that_exists() -> None:
    found = 0
    for row in rows_of_tables():
        if row[-1] in ("test", "how"):
            continue
        names = re.findall(r"`(tests/[^`]+::[^`]+)`", row[-1])
        if row[1].startswith("not run"):
            assert not names, row
            continue
        assert names, f"{row[0]} names no test"
        for name in names:
            assert exists(name), name
            found += 1
    assert found > 60


def test_names_that_do_not_exist_are_noticed() -> None:
    assert not exists("tests/integrations/test_compatibility.py::test_nothing")
    assert not exists("tests/nowhere.py::test_nothing")
    assert not functions("tests/nowhere.py")


@pytest.mark.parametrize("name", [*EXACT, *FORMS])
def test_families_and_forms_stand_in_the_page(name: str) -> None:
    word = re.split(r"[ (,]", name)[0]
    assert any(word.lower() in row[0].lower() and "exact" in row[1] for row in rows_of_tables()), name


def test_the_versions_of_the_page_are_those_that_are_checked() -> None:
    rows = {row[0]: row[1] for row in rows_of_tables()}
    for name, least in OLDEST.items():
        assert rows[name] == ".".join(map(str, least))
