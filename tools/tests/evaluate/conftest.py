"""A tiny pipeline, tiny networks, and a run of both."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_pipeline
from PIL import Image
from tools.tests import tiny_networks

from tokenmerge_tools.evaluate.evaluation import EvaluateOptions
from tokenmerge_tools.evaluate.prompts import Item
from tokenmerge_tools.evaluate.runner import evaluate
from tokenmerge_tools.records.kinds import QualityRecord
from tokenmerge_tools.variants.variant import Variant


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``tiny``, ``dino`` and ``clip``."""
    folder = tmp_path_factory.mktemp("models")
    tiny_pipeline.write_pipeline(folder / "tiny")
    tiny_networks.write_dino(folder / "dino")
    tiny_networks.write_clip(folder / "clip")
    return folder


@pytest.fixture(autouse=True)
def _no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source may change while the tests run, and asking git takes longer than drawing."""
    monkeypatch.setattr("tokenmerge_tools.evaluate.evaluation.source_commit", lambda: None)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path)


def write_prompts(folder: Path) -> Path:
    path = folder / "prompts.txt"
    path.write_text("red apple\nblue boat\ngreen tree\n")
    return path


def make_options(models: Path, prompts: Path, out: Path, /, **changes: object) -> EvaluateOptions:
    """Options for three prompts on the tiny pipeline, with changes."""
    values = {
        "model": str(models / "tiny"),
        "prompts": prompts,
        "steps": 2,
        "variants": ("tome",),
        "ratio": (0.5,),
        "batch": 2,
        "device": "cpu",
        "out": out / "results" / "evaluate.jsonl",
    }
    return EvaluateOptions(**{**values, **changes})


@pytest.fixture
def options(models: Path, prompts: Path, tmp_path: Path) -> Callable[..., EvaluateOptions]:
    return lambda **changes: make_options(models, prompts, tmp_path, **changes)


@pytest.fixture(scope="session")
def drawn_once(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results and images of a run with the default options."""
    folder = tmp_path_factory.mktemp("drawn")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tokenmerge_tools.evaluate.evaluation.source_commit", lambda: None)
        evaluate(make_options(models, write_prompts(folder), folder))
    return folder / "results"


@pytest.fixture
def finished(drawn_once: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, in the place where a run with the default options looks for it."""
    return shutil.copytree(drawn_once, tmp_path / "results")


@pytest.fixture
def run(options: Callable[..., EvaluateOptions]) -> Callable[..., list[QualityRecord]]:
    """Evaluate with these options. ``notes`` gets the notes, ``drawn`` the numbers of drawn images."""

    def execute(notes: list[str] | None = None, drawn: list[int] | None = None, **changes: object):
        def on_progress(progress):
            if drawn is not None:
                drawn.append(progress.done)

        made = options(**changes)
        return evaluate(made, on_progress, (notes if notes is not None else []).append)

    return execute


def picture(seed: int, side: int = 32) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (side // 4, side // 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((side, side))


def drawn(name: str = "dense", **settings: object) -> Variant:
    return Variant(name, tuple(settings.items()))


def item(text: str = "red apple", seed: int = 0) -> Item:
    return Item(text, seed)


def changed(record: QualityRecord, **changes: object) -> QualityRecord:
    return dataclasses.replace(record, **changes)
