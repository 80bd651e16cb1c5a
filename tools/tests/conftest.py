"""The operations of a model are counted once in a session for each configuration and size."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tokenmerge.config import ToMeConfig
from tokenmerge.models.find import find_hosts
from tokenmerge.report import Report, predict
from tokenmerge_tools.pipelines.loading import find_model
from tokenmerge_tools.pipelines.meta_model import load_sketch

_PREDICTING = (
    "tokenmerge.handle",
    *("tokenmerge_tools.drawing", "tokenmerge_tools.bench.prepare", "tokenmerge_tools.cli.inspect"),
    "tokenmerge_tools.evaluate.evaluation",
)
_REPORTS: dict[tuple[Any, ...], Report] = {}


@pytest.fixture(autouse=True)
def _each_report_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what commands and handles predict. Counting takes longer than drawing with a tiny model."""

    def known(pipe_or_model: Any, config: ToMeConfig, *size: Any) -> Report:
        *others, dense = (*size, {})[:6]
        roots = [host.root for host in find_hosts(pipe_or_model)]
        architecture = [f"{type(root).__name__} {root.dtype} {root.config}" for root in roots]
        key = (type(pipe_or_model), *architecture, config, str(others), str([*dense.values()]))
        if key not in _REPORTS:
            _REPORTS[key] = predict(pipe_or_model, config, *size)
        return _REPORTS[key]

    for module in _PREDICTING:
        monkeypatch.setattr(import_module(module), "predict", known)


@pytest.fixture(scope="session")
def _one_report(folder: Path) -> Report:
    return predict(load_sketch(find_model(str(folder))).denoiser, ToMeConfig(), 16, 16)


@pytest.fixture
def uncounted(_each_report_once: None, _one_report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict the same for all settings, for tests that read only the settings."""
    for module in _PREDICTING:
        monkeypatch.setattr(import_module(module), "predict", lambda *_: _one_report)
