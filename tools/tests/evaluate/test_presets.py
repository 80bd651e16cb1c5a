"""The protocol of a paper on a tiny model: prompts, rivals, metrics by stubs, records, report, dry run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import PIL.Image
import pytest
import torch
from typer.testing import CliRunner

from tokenmerge.errors import ConfigError
from tokenmerge_tools.cli.app import app
from tokenmerge_tools.evaluate.evaluation import EvaluateOptions
from tokenmerge_tools.evaluate.measure import Measured, _comparisons, not_told_apart
from tokenmerge_tools.evaluate.metrics import load_metrics, parse_metrics
from tokenmerge_tools.evaluate.prompts import download_prompts
from tokenmerge_tools.pipelines.loading import SourceKind, find_model
from tokenmerge_tools.records.file import read_results
from tokenmerge_tools.variants.rivals import RIVALS


class StubReward:
    """Scores an image by its mean, in place of ImageReward's gigabyte of weights."""

    def to(self, device: torch.device) -> None:
        self.moved = device

    def score(self, prompt: str, picture: object) -> float:
        return sum(picture.resize((1, 1)).getpixel((0, 0))) / 100 + len(prompt)


@pytest.fixture
def rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = ModuleType("ImageReward")
    stub.load = lambda name, device: StubReward()
    stub.__spec__ = SimpleNamespace(name="ImageReward")
    monkeypatch.setitem(sys.modules, "ImageReward", stub)


def run(*arguments: object):
    result = CliRunner().invoke(app, ["evaluate", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.usefixtures("rewards")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_preset_runs_from_prompts_to_report_and_continues(
    models: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "results" / "evaluate.jsonl"
    command = (
        *("--preset", "drawbench", "--prompts", prompts, "--limit", 2, "--model", models / "tiny"),
        *("--steps", 6, "--batch", 2, "--device", "cpu", "--speedup", 2, "--ratio", 0.5, "-o", out),
        *("--metric", f"clip-score={models / 'clip'}", "--metric", "image-reward"),
    )
    assert "run the same command with --limit 1 first" in run(*command, "--dry-run").stdout
    assert not out.exists()
    result = run(*command)
    records = {record.label: record for record in read_results([out]).quality if record.category is None}
    dense, auto = records["dense"], records["auto speedup=2"]
    left_out = [note for note in dense.notes if "is left out" in note]
    ran = {record.variant for record in records.values()}
    assert {"dense", "auto", "fewer-steps", "tomesd", "pyramid", "easycache"} <= ran
    named = {note.split()[0] for note in left_out}
    assert named == set(RIVALS) - ran
    assert any("seacache does not know the transformer blocks of UNet2DCond" in note for note in left_out)
    assert set(dense.figures) == {"clip-score", "image-reward"}
    assert set(auto.errors) == {"psnr", "ssim", "clip-score", "image-reward"}
    for record in records.values():
        assert record.cost["seconds"] > 0
        assert record.variant in ("dense", "tomesd") or record.cost["counted"] > 0
    assert 1 < records["pyramid interval=2"].cost["counted"] < 2
    assert any("image-reward: " in note and "the best" in note for note in dense.notes)
    assert "± " in result.stdout
    again = run(*command, "--dry-run").stdout  # only those that do not run are not drawn
    assert f"of which {2 * len(named):,} are not drawn yet" in again
    assert "measured on 2 images" in again
    page = tmp_path / "report.html"
    assert CliRunner().invoke(app, ["report", str(out), "-o", str(page)]).exit_code == 0
    text = page.read_text()
    assert "image-reward" in text
    assert "is left out" in text


def test_a_dry_run_reckons_with_the_counted_operations(models: Path, prompts: Path, tmp_path: Path) -> None:
    command = (
        *(
            "--prompts",
            prompts,
            "--model",
            models / "tiny",
            "--steps",
            12,
            "--device",
            "cpu",
            "--variant",
            "tome",
        ),
        *("--variant", "easycache", "--variant", "fewer-steps", "--ratio", 0.5, "-o", tmp_path / "x.jsonl"),
        *("--dry-run", "--seconds-per-picture", 1200),
    )
    lines = run(*command).stdout.splitlines()
    assert lines[0].startswith("4 variants × 3 prompts × 1 seeds: 12 images, of which 12 are not drawn yet")
    hours = float(lines[1].partition(" hours")[0])
    assert 3.0 < hours < 4.0  # dense and EasyCache take an hour each, the others less
    assert "at 1.2e+03 s for a dense image (given)" in lines[1]
    assert lines[2] == "reckoned as slow as dense: easycache threshold=0.2"
    assert not list(tmp_path.rglob("*.png"))


def test_every_nth_prompt_is_of_the_first_ones(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"prompt {number}\n" for number in range(30)))
    options = EvaluateOptions(model=str(models / "tiny"), prompts=file, limit=20, every_nth=10)
    assert options.read_prompts() == ["prompt 0", "prompt 10"]


def test_the_prompts_of_a_preset_come_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, **arguments: object) -> list[dict[str, str]]:
        asked.append((name, arguments))
        return [{"Prompts": f" a {n % 3} ", "Category": "Colors", "other": ""} for n in range(9)]

    stub = ModuleType("datasets")
    stub.load_dataset = load_dataset
    stub.__spec__ = SimpleNamespace(name="datasets")
    monkeypatch.setitem(sys.modules, "datasets", stub)
    found = download_prompts("drawbench", 2)
    assert found == ["a 0", "a 1"]
    assert asked == [("sayakpaul/drawbench", {"split": "train", "streaming": True})]
    stub.load_dataset = lambda *_, **__: (_ for _ in ()).throw(OSError("no route to host"))
    with pytest.raises(ConfigError, match=r"drawbench: cannot load .* .no route to host.; .*give --prompts"):
        download_prompts("drawbench", 2)
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match="datasets is not installed; run: pip install datasets, or give --prom"
    ):
        download_prompts("coco", None)


def test_a_preset_that_does_not_exist_names_those_that_do() -> None:
    with pytest.raises(ConfigError, match="preset: expected one of 'drawbench', 'partiprompts', 'coco'"):
        EvaluateOptions(preset="none", model="owner/name")


def test_image_reward_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ImageReward", None)
    words = (
        "metric image-reward: its package is not installed; run: pip install image-reward; or leave it out"
    )
    with pytest.raises(ConfigError, match=words):
        load_metrics(parse_metrics(["image-reward"]), ["a"], lambda note: None)


def test_a_model_has_a_name_instead_of_an_id() -> None:
    for name in ("FLUX.1-dev", "Qwen-Image", "SDXL", "SD3.5", "Wan"):
        source = find_model(name)
        assert source.kind is SourceKind.HUB
        assert "/" in source.location


@pytest.mark.parametrize(
    ("other", "alike"), [((2.0, 3.0, 4.0), []), ((1.0, 4.0, 2.5), ["other"]), ((1.1, 2.1, 3.1), [])]
)
def test_a_setting_is_better_only_by_more_than_its_noise(other: tuple[float, ...], alike: list[str]) -> None:
    """Pairs cancel what all images have in common: (1, 2, 3) is below (1.1, 2.1, 3.1) without noise."""
    columns = {"one": [1.0, 2.0, 3.0], "other": list(other)}
    measured = {name: Measured({"m": values}) for name, values in columns.items()}
    found = not_told_apart(measured, "m", lower=False)
    assert found == ({"other": ["one"]} if alike else {"other": []})
    lower = not_told_apart(measured, "m", lower=True)
    assert lower == ({"one": ["other"]} if alike else {"one": []})


def test_no_variant_is_the_best_of_equal_ones() -> None:
    metrics: Any = SimpleNamespace(of_pictures=(SimpleNamespace(name="psnr"),))

    def notes(**columns: list[float]) -> list[str]:
        measured = {name: Measured({"psnr": values}) for name, values in columns.items()}
        return _comparisons(metrics, measured)

    assert notes(a=[30.0, 31.0], b=[30.0, 31.0]) == []
    (note,) = notes(a=[30.0, 31.0], b=[30.0, 31.0], c=[20.0, 21.0])
    assert note.startswith("psnr: a, b are equal and the best, by more than its noise (")
    (note,) = notes(a=[30.0, 31.0], b=[20.0, 21.0])
    assert note.startswith("psnr: a is the best, by more than its noise (")


def test_without_timing_the_operations_of_each_picture_are_counted(
    models: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "busy.jsonl"
    command = (
        *("--prompts", prompts, "--limit", 2, "--model", models / "tiny", "--steps", 4, "--batch", 1),
        *("--device", "cpu", "--variant", "tome", "--variant", "pyramid", "--ratio", 0.5),
        *("--untimed", "-o", out),
    )
    run(*command)
    records = {record.label: record for record in read_results([out]).quality}
    dense, pyramid = records["dense"], records["pyramid interval=2"]
    assert 1 < pyramid.cost["counted"] < 2
    for record in (dense, pyramid, records["tome ratio=0.5"]):
        assert record.speedup is None
        assert "seconds" not in record.cost
    pictures = list(tmp_path.glob("busy/*/pyramid*/*.png"))
    assert len(pictures) == 2
    assert all("counted" in PIL.Image.open(picture).text["tokenmerge cost"] for picture in pictures)
