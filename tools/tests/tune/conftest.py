"""Options for a tiny pipeline, a studio that draws nothing, and a finished search with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diffusers import StableDiffusionPipeline
from tools.tests import made_up_studio

from tokenmerge_tools.tune.options import TuneOptions
from tokenmerge_tools.tune.runner import Search, tune


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, pipe: StableDiffusionPipeline) -> type[made_up_studio.MadeUp]:
    """The studio that draws nothing, in place of the real one."""
    return made_up_studio.install(monkeypatch, pipe)


def make_options(model: Path, results: Path, **changes: object) -> TuneOptions:
    """Options for three prompts, with changes."""
    prompts = results / "prompts.txt"
    prompts.write_text("red apple\nblue boat\ngreen tree\n")
    values = {
        "speedup": 1.5,
        "model": str(model),
        "prompts": prompts,
        "steps": 20,
        "device": "cpu",
        "items": 6,
        "within": 100_000.0,
        "out": results / "results" / "tuned.json",
    }
    return TuneOptions(**{**values, **changes})


@pytest.fixture
def options(folder: Path, tmp_path: Path) -> Callable[..., TuneOptions]:
    """Options for three prompts on the tiny pipeline, with changes."""
    return lambda **changes: make_options(folder, tmp_path, **changes)


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Search:
    """A finished search with the default options, for tests that only read it."""
    with pytest.MonkeyPatch.context() as patched:
        made_up_studio.install(patched, StableDiffusionPipeline.from_pretrained(folder, safety_checker=None))
        return tune(make_options(folder, tmp_path_factory.mktemp("tuned")))
