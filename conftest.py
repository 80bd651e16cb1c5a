"""Settings for all tests."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline
from hypothesis import settings
from tiny_pipeline import write_pipeline

import tokenmerge.default_method
import tokenmerge.handle
from tokenmerge.planners import calibration
from tokenmerge.plans import choose, policy

_measure = calibration.measure_fewest_tokens
_FEWEST, _FEWEST_OF_POLICY = 16, policy.FEWEST_TOKENS

# No deadline, since times depend on the machine. Always the same examples, so that failures repeat.
settings.register_profile("tokenmerge", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("tokenmerge")


def pytest_collection_finish() -> None:
    """Leave what the imports made out of later garbage collections, which then take a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the default method time nothing, so that a busy machine changes no test.

    A test that replaces the measurement gets its own number.
    """
    found = tokenmerge.default_method.fewest_tokens

    def fewest_tokens(*args: Any) -> int:
        return _FEWEST if calibration.measure_fewest_tokens is _measure else found(*args)

    monkeypatch.setattr(tokenmerge.default_method, "fewest_tokens", fewest_tokens)
    monkeypatch.setattr(tokenmerge.handle, "fewest_tokens", lambda *_: 0)  # nothing is slower than dense
    # Pictures of tests have few tokens. The policy merges larger grids alone.
    monkeypatch.setattr(policy, "FEWEST_TOKENS", _FEWEST)


@pytest.fixture
def large_grids_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let only grids merge of which the policy says so, as outside the tests."""
    monkeypatch.setattr(policy, "FEWEST_TOKENS", _FEWEST_OF_POLICY)
    choose.plans_of.cache_clear()
    yield
    choose.plans_of.cache_clear()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("pipeline") / "pipeline")


@pytest.fixture
def pipe(folder: Path) -> StableDiffusionPipeline:
    loaded = StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    loaded.set_progress_bar_config(disable=True)
    return loaded
