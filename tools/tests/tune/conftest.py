"""Options for a tiny pipeline, and an easel that draws nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diffusers import StableDiffusionPipeline
from tools.tests import made_up_studio

from tokenmerge_tools.tune.options import TuneOptions


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, pipe: StableDiffusionPipeline) -> type[made_up_studio.MadeUp]:
    """The easel that draws nothing, in place of the real one."""
    return made_up_studio.install(monkeypatch, pipe)


@pytest.fixture
def options(folder: Path, tmp_path: Path) -> Callable[..., TuneOptions]:
    """Options for three prompts on the tiny pipeline, with changes."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("red apple\nblue boat\ngreen tree\n")
    values = {
        "model": str(folder),
        "prompts": prompts,
        "steps": 20,
        "device": "cpu",
        "out": tmp_path / "results" / "tuned.json",
    }
    return lambda **changes: TuneOptions(**{**values, **changes})
