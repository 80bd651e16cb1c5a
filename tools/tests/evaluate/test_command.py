from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from tools.tests.evaluate.conftest import changed
from typer.testing import CliRunner

from tokenmerge.errors import ConfigError
from tokenmerge_tools.cli.app import app
from tokenmerge_tools.records.file import read_results
from tokenmerge_tools.records.kinds import QualityRecord

# The package has a function of this name.
command = importlib.import_module("tokenmerge_tools.cli.evaluate")

RECORD = QualityRecord(
    model="m",
    width=64,
    height=32,
    variant="dense",
    settings={},
    figures={"clip-score": 27.5},
    images=4,
    conditions={"steps": 20},
)


def run(*arguments: object):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


@pytest.mark.slow
# DPMSolverMultistepScheduler of diffusers 0.42 hands a tensor to numpy in a way that numpy 2 deprecates.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_the_bundled_model_is_measured_with_its_own_prompts(tmp_path: Path) -> None:
    out = tmp_path / "evaluate.jsonl"
    result = run(
        "--variant",
        "tome",
        "--ratio",
        0.5,
        "--limit",
        2,
        "--steps",
        3,
        "--device",
        "cpu",
        "--samples",
        1,
        "-o",
        out,
    )
    assert result.exit_code == 0, result.output
    dense, tome = read_results([tmp_path]).quality
    assert set(dense.figures) == {"glyphs"}
    assert set(tome.figures) == {"psnr", "ssim", "glyphs"}
    assert (tome.model, tome.width, tome.height, tome.images) == ("emoji-unet", 128, 128, 2)
    header = next(line for line in result.stdout.splitlines() if "variant" in line)
    names = [name.strip() for name in header.split("┃")[1:-1]]
    costs = ["by the clock", "seconds", "peak GiB"]
    assert names == ["variant", "images", *costs, "psnr ↑", "ssim ↑", "glyphs ↑"]
    assert f"tokenmerge report {tmp_path}" in result.stdout
    assert "2/2" not in result.stdout  # progress is for the terminal, not for a pipe


def test_a_table_with_categories_has_a_row_for_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [RECORD, changed(RECORD, category="[bold]Animals", images=3, figures={"fid": 33.123456})]
    monkeypatch.setattr(command, "run_evaluate", lambda *args, **named: records)
    lines = run().stdout.splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    header = next(line for line in lines if "variant" in line)
    names = [name.strip() for name in header.split("┃")[1:-1]]
    assert names == ["variant", "category", "images", "clip-score ↑", "fid ↓"]
    assert rows == [["dense", "all", "4", "27.5", ""], ["dense", "[bold]Animals", "3", "", "33.12"]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--metric", "none"], "expected some of psnr, ssim, lpips"),
        (["--variant", "none"], "expected some of auto, tome, "),
        (["--variant", "tome:none=1"], "expected settings out of"),
        (["--prompts", "missing.txt"], "cannot read missing.txt"),
        (["--model", "owner/name"], "give --prompts"),
        (["--size", "big"], "expected WIDTHxHEIGHT"),
        (["--dtype", "fp8"], "expected one of 'auto', 'fp32', 'fp16', 'bf16'"),
    ],
)
def test_bad_input_is_named(arguments: list[str], words: str) -> None:
    error = run(*arguments).exception
    assert isinstance(error, ConfigError)
    assert words in str(error)
