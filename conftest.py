"""Settings for all tests."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline
from hypothesis import settings
from tiny_pipeline import write_pipeline

from tokenmerge import calibration, default_method, handle
from tokenmerge.plans import choose, pays_from, policy
from tokenmerge.runtime.memory.run_log import RunLog

_FEWEST, _FEWEST_OF_POLICY = 16, policy.FEWEST_TOKENS
_TOKENS_ON_CPU = calibration.TOKENS_ON_CPU
_GIVE_UP = RunLog.give_up

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
def _small_grids_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let merging pay on every grid, and time nothing on a device that pretends to be one."""
    monkeypatch.setattr(calibration, "TOKENS_ON_CPU", 0)
    for module in (default_method, handle):
        monkeypatch.setattr(module, "fewest_tokens", lambda *_: pays_from(calibration.TOKENS_ON_CPU))
    # Images of tests have few tokens. The policy merges larger grids alone.
    monkeypatch.setattr(policy, "FEWEST_TOKENS", {"unet": _FEWEST, "transformer": _FEWEST})


@pytest.fixture(autouse=True)
def errors_of_observers_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an error in what only observes a generation fail the test, which users' generations survive."""

    def failed(log: RunLog, error: Exception) -> None:
        raise error

    monkeypatch.setattr(RunLog, "give_up", failed)


@pytest.fixture
def errors_of_observers_survive(errors_of_observers_raise: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an error in what observes a generation cost its figures alone, as outside the tests."""
    monkeypatch.setattr(RunLog, "give_up", _GIVE_UP)


@pytest.fixture
def large_grids_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let only those grids merge that merge outside the tests."""
    monkeypatch.setattr(policy, "FEWEST_TOKENS", _FEWEST_OF_POLICY)
    monkeypatch.setattr(calibration, "TOKENS_ON_CPU", _TOKENS_ON_CPU)
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
