"""The operations of a model are counted once in a session for each configuration and size."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tokenmerge.config import ToMeConfig
from tokenmerge.report import Report, predict
from tokenmerge_tools.pipelines.loading import denoising_models, find_model
from tokenmerge_tools.pipelines.meta_model import load_sketch

_PREDICTING = ("drawing", "bench.prepare", "cli.inspect")
_REPORTS: dict[tuple[Any, ...], Report] = {}


@pytest.fixture(autouse=True)
def _each_report_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what the commands predict. Counting takes longer than drawing with a tiny model."""

    def known(pipe_or_model: Any, config: ToMeConfig, *size: Any) -> Report:
        models = denoising_models(pipe_or_model) or {"": pipe_or_model}
        architecture = [f"{type(one)} {one.dtype} {dict(one.config)}" for one in models.values()]
        key = (type(pipe_or_model), *architecture, config, *map(str, size))
        if key not in _REPORTS:
            _REPORTS[key] = predict(pipe_or_model, config, *size)
        return _REPORTS[key]

    for module in _PREDICTING:
        monkeypatch.setattr(import_module(f"tokenmerge_tools.{module}"), "predict", known)


@pytest.fixture(scope="session")
def _one_report(folder: Path) -> Report:
    return predict(load_sketch(find_model(str(folder))).denoiser, ToMeConfig(), 16, 16)


@pytest.fixture
def uncounted(_each_report_once: None, _one_report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict the same for all settings, for tests that read only the settings."""
    for module in _PREDICTING:
        monkeypatch.setattr(import_module(f"tokenmerge_tools.{module}"), "predict", lambda *_: _one_report)
