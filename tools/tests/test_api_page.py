"""The page of the API promises public names and arguments: they are those of the code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import tokenmerge

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
SCRIPT = runpy.run_path(str(ROOT / "docs" / "api.py"))


def experimental() -> list[str]:
    (block,) = re.findall(r"<!-- experimental names -->\n(.*?)<!-- end -->", PAGE, flags=re.DOTALL)
    return re.findall(r"^- `(.+)`$", block, flags=re.MULTILINE)


def test_the_names_and_arguments_of_the_page_are_those_of_the_code():
    """If a public name changed on purpose: deprecate it as the page says, then run python docs/api.py."""
    assert SCRIPT["written"](PAGE) == PAGE


def test_the_page_documents_every_name_that_the_package_exports():
    names = {name.rpartition(".")[2] for name in SCRIPT["documented"](PAGE)}
    assert set(tokenmerge.__all__) - {"__version__", "merge", "presets"} <= names
    assert {"tokenmerge.merge", "tokenmerge.presets"} <= set(
        re.findall(r"^- module `(.+?)`", PAGE, flags=re.MULTILINE)
    )


def test_what_is_experimental_is_documented():
    assert experimental()
    assert set(experimental()) <= SCRIPT["documented"](PAGE).keys()


def with_another_default(one, *, two: int = 3): ...


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda one, *, two=2: None, "(one, *, two=2)"),
        (with_another_default, "(one, *, two=3)"),
    ],
)
def test_a_signature_shows_names_kinds_and_defaults(change, line):
    assert SCRIPT["signature"](change) == line
