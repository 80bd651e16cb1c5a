"""Settings for all tests."""

from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline
from hypothesis import settings
from tiny_pipeline import write_pipeline

# Times depend on the machine; the same examples every time keep a failure repeatable.
settings.register_profile("tokenmerge", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("tokenmerge")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("pipeline") / "pipeline")


@pytest.fixture
def pipe(folder: Path) -> StableDiffusionPipeline:
    loaded = StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    loaded.set_progress_bar_config(disable=True)
    return loaded
