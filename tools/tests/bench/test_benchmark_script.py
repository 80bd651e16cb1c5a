from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmerge_tools.cli import main
from tokenmerge_tools.evaluate.evaluation import EvaluateOptions

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "measure.py"
_spec = importlib.util.spec_from_file_location("measure", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
measure = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(measure)


def asked_for(
    part: Callable[[str], None], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> EvaluateOptions:
    """The arguments with which a part of the script calls `tokenmerge evaluate`."""
    shutil.copy(SCRIPT.parent / "results" / f"{name}.toml", tmp_path)
    asked: list[EvaluateOptions] = []
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(measure, "tokenmerge", lambda *arguments: main([str(text) for text in arguments]))
    command = importlib.import_module("tokenmerge_tools.cli.evaluate")

    def ask(options: EvaluateOptions, *_: object, **__: object) -> None:
        asked.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_evaluate", ask)
    part(name)
    (options,) = asked
    return options


@pytest.mark.parametrize("name", measure.QUALITY)
def test_pictures_are_drawn_as_the_grid_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = asked_for(measure.evaluate, name, tmp_path, monkeypatch)
    grid = measure.read_grid(name)
    ratio = grid.get("ratio", 0.5)
    assert options.ratio == tuple(ratio if isinstance(ratio, list) else [ratio])
    assert set(options.variants) == set(grid["variants"])
    assert (options.model, options.size) == (grid["model"], (grid["size"],) * 2)
    assert (options.steps, options.guidance) == (grid["steps"], grid["guidance"])
    assert (options.dtype, options.device) == (grid["dtype"], grid["device"])


@pytest.mark.parametrize("name", measure.QUALITY)
def test_auto_is_drawn_beside_its_rivals(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = asked_for(measure.auto, name, tmp_path, monkeypatch)
    grid = measure.read_grid(name)
    others = ("todo", "deepcache", "first-block-cache")
    rivals = {"tomesd:ratio=0.5", "tome:proportional,ratio=0.5"}
    rivals |= {variant for variant in grid["variants"] if variant.startswith(others)}
    assert {"auto", "fewer-steps"} <= set(options.variants)
    assert set(options.variants) <= {"auto", "fewer-steps", *rivals}
    assert (options.model, options.size) == (grid["model"], (grid["size"],) * 2)
    assert (options.steps, options.guidance, options.batch) == (grid["steps"], grid["guidance"], 1)


def test_results_come_back_after_a_measurement_that_was_killed(tmp_path):
    """After a kill, the old results are still put aside, and some new ones are in their place."""
    out, folder = tmp_path / "out.jsonl", tmp_path / "out"
    for path in (folder, tmp_path / "out.before"):
        path.mkdir()
    (folder / "picture").write_text("new")
    (tmp_path / "out.before" / "picture").write_text("old")
    out.write_text("new")
    (tmp_path / "out.jsonl.before").write_text("old")

    def interrupted() -> None:
        with measure.anew(out, folder):
            assert not out.exists()
            assert not folder.exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert out.read_text() == (folder / "picture").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.jsonl"]
