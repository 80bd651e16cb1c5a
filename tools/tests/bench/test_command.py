from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tokenmerge.errors import ConfigError
from tokenmerge_tools.bench.grid import BenchOptions
from tokenmerge_tools.records.file import read_records
from tokenmerge_tools.records.kinds import CellRecord

# The package has a function with the name of this module.
command = importlib.import_module("tokenmerge_tools.cli.bench")
app = typer.Typer()
app.command()(command.bench)


def run(*arguments: str) -> object:
    return CliRunner().invoke(app, list(arguments))


def test_measures_and_shows_a_table(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    result = run("--model", "geometry:tiny", "--variant", "tome", "--rounds", "1", "-o", str(out))
    assert result.exit_code == 0, result.output
    row = next(line for line in result.stdout.splitlines() if "tome ratio=0.5" in line)
    assert "SDPA" in row
    assert "denoiser alone, one of 25 steps" in result.stdout
    assert "1.00×" in result.stdout
    assert "[2/2]" in result.stderr
    assert len(list(read_records(out, CellRecord))) == 2


def test_flags_change_single_values_of_a_grid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    grids: list[BenchOptions] = []
    monkeypatch.setattr(command, "run_grid", lambda grid, *rest, **named: grids.append(grid))
    toml = tmp_path / "grid.toml"
    toml.write_text('steps = 50\ndtype = "fp16"\nratio = [0.25, 0.5]\n')
    result = run("--grid", str(toml), "--dtype", "fp32", "-o", str(tmp_path / "a"))
    assert result.exit_code == 0, result.output
    assert (grids[0].dtype, grids[0].steps, grids[0].ratio) == (("fp32",), 50, (0.25, 0.5))


def test_a_preset_is_measured_with_what_flags_change(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    tiny = (
        "--model",
        "geometry:tiny",
        "--size",
        "64",
        "--dtype",
        "fp32",
        "--variant",
        "tome",
        "--rounds",
        "1",
    )
    result = run("--preset", "paper", *tiny, "--attention", "sdpa", "-o", str(out))
    assert result.exit_code == 0, result.output
    records = list(read_records(out, CellRecord))
    assert [record.conditions["steps"] for record in records] == [50] * 7
    assert [record.conditions["settings"].get("ratio") for record in records] == [
        None,
        0.1,
        0.2,
        0.3,
        0.4,
        0.5,
        0.6,
    ]


def test_help_tells_the_defaults() -> None:
    text = " ".join(run("--help").output.replace("│", " ").split())
    for name, field in BenchOptions.__dataclass_fields__.items():
        if field.default not in (None, (), (False,), ""):
            values = field.default if isinstance(field.default, tuple) else (field.default,)
            assert f"Default: {', '.join(map(str, values))}." in text, name


def test_ctrl_c_says_what_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(grid: BenchOptions, out: Path, on_cell: object, on_note: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_grid", interrupted)
    result = run("-o", str(tmp_path / "results.jsonl"))
    assert "0 finished cells are in" in result.stderr
    assert result.exit_code == 130


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--preset", "none"],
            "preset: expected one of 'diffusers-docs', 'paper', 'ppdiffusers', got 'none'",
        ),
        (["--preset", "paper", "--grid", "a.toml"], "give only one of them"),
        (["--preset", "paper", "--device", "cpu"], "fp16 is slow and partly unsupported on a CPU"),
        (["--variant", "none"], "expected one of dense, auto, tome"),
        (["--ratio", "0.9"], "0.75"),
        (["--grid", "missing.toml"], "cannot read"),
    ],
)
def test_bad_input_is_named(arguments: list[str], words: str) -> None:
    error = run(*arguments).exception
    assert isinstance(error, ConfigError)
    assert words in str(error)
