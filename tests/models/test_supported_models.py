"""The pages of supported models say what the families' records say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from tests.models.tiny import FAMILIES

SCRIPT = Path(__file__).parents[2] / "docs" / "supported_models.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("supported_models", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_those_of_the_records(script):
    """With the numbers of checks that they have: `python docs/supported_models.py` counts them anew."""
    text = script.PAGE.read_text(encoding="utf-8")
    (release,) = set(re.findall(r"\| (diffusers \d[\w.]*) \|", text))
    for path, expected in script.pages(script.known_checks(), release).items():
        assert path.read_text(encoding="utf-8") == expected, path.name


def test_all_checks_passed(script):
    """A model whose checks fail is no supported one, and so is one whose checks were not counted."""
    checks = script.known_checks()
    assert checks.keys() == FAMILIES.keys()
    for key, (passed, number) in checks.items():
        assert passed == number > 0, key


def test_a_line_says_what_merges_and_what_is_skipped(script):
    line = script.row("SanaVideoTransformer3DModel", (3, 3), "diffusers 1.0")
    assert line.startswith("| `SanaVideoTransformer3DModel` | self-attention, cross-attention | blocks | ")
    assert "| diffusers 1.0: 3 of 3 | the MLP of SANA-Video convolves" in line
    assert "| stages |" in script.row("UNet2DConditionModel", (3, 3), "diffusers 1.0")
    assert "image by image" in script.row("Krea2Transformer2DModel", (3, 3), "diffusers 1.0")


def test_a_line_of_a_class_without_merging_says_why(script):
    line = script.row_alone("OmniGenTransformer2DModel", "diffusers 1.0")
    assert line.endswith("| list of blocks | diffusers 1.0 |")
    assert "| none: " in script.row_alone("RFD4ProteinaTransformer", "diffusers 1.0")
    assert "| whole output |" in script.row_alone("ZImageControlNetModel", "diffusers 1.0")
