"""``tokenmerge tune``, and ``--settings`` in the other commands."""

from __future__ import annotations

import importlib
import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from tools.tests import made_up_studio
from typer.testing import CliRunner

from tokenmerge import ConfigError, ToMeConfig, apply_token_merging
from tokenmerge.config import save_config
from tokenmerge_tools.cli import main
from tokenmerge_tools.cli.app import app

command = importlib.import_module("tokenmerge_tools.cli.tune")


@pytest.fixture
def made_up(monkeypatch, pipe):
    return made_up_studio.install(monkeypatch, pipe)


@pytest.fixture
def model(folder: Path) -> Path:
    return folder


@pytest.fixture
def arguments(folder: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("red apple\nblue boat\ngreen tree\n")
    out = tmp_path / "tuned.json"
    return ["tune", "--model", str(folder), "--prompts", str(prompts), "--device", "cpu", "--steps", "20",
            "--items", "4", "--within", "10h", "--out", str(out)]  # fmt: skip


def test_the_command_prints_a_table_and_the_line_to_paste(made_up, arguments, tmp_path, capsys) -> None:
    assert main([*arguments, "--min-speedup", "1.5"]) == 0
    printed = capsys.readouterr()
    assert "a speed-up of at least 1.5" in printed.out
    assert "chosen" in printed.out
    assert "fewer-steps" in printed.out
    out = tmp_path / "tuned.json"
    assert f"in Python: tokenmerge.apply_token_merging(pipe, {str(out)!r})" in printed.out
    assert "best so far" in printed.err
    assert "best so far" not in printed.out
    for suffix in (".json", ".jsonl", ".svg"):
        assert out.with_suffix(suffix).exists()


def test_a_goal_that_is_not_reached_has_an_exit_code_of_its_own(made_up, arguments, capsys) -> None:
    assert main([*arguments, "--min-speedup", "40"]) == command.GOAL_NOT_REACHED == 3
    printed = capsys.readouterr()
    assert "no setting reaches a speed-up of at least 40; the nearest is" in printed.out


def test_ctrl_c_reports_what_it_has(made_up, arguments, tmp_path, capsys) -> None:
    made_up.stop = 5, KeyboardInterrupt()
    assert main([*arguments, "--min-speedup", "1.5"]) == 130
    printed = capsys.readouterr()
    assert "chosen" in printed.out
    assert printed.err.endswith("tokenmerge: interrupted; finished results are kept\n")
    assert json.loads((tmp_path / "tuned.json").read_text())["tuned"]["complete"] is False


def test_a_run_that_had_time_for_one_setting_says_so(made_up, arguments, capsys) -> None:
    assert main([*arguments, "--min-speedup", "40", "--within", "1s"]) == command.GOAL_NOT_REACHED
    printed = capsys.readouterr().out
    assert re.search(r"Not enough time: only 1 of \d+ settings was tried, so this is no search\.", printed)
    assert re.search(r"Give --within \d+min, or take the default method", printed)


def test_where_every_setting_fails_nobody_is_told_to_run_it_again(
    made_up, arguments, tmp_path, capsys
) -> None:
    class Everything(tuple):
        def __contains__(self, name: object) -> bool:
            return True

    made_up.failing = Everything()
    assert main([*arguments, "--min-speedup", "1.5"]) == command.GOAL_NOT_REACHED
    printed = capsys.readouterr().err
    assert "auto speedup=4 cannot run here: it is made to fail" in printed
    assert "no setting can be measured here, as the notes say; change --size, --steps or --model" in printed
    assert "again" not in printed
    assert not (tmp_path / "tuned.json").exists()


def test_ctrl_c_before_the_first_picture_writes_no_settings(made_up, arguments, tmp_path, capsys) -> None:
    made_up.stop = 0, KeyboardInterrupt()
    assert main([*arguments, "--min-speedup", "1.5"]) == 130
    assert "no setting was measured, and the same command begins again" in capsys.readouterr().err
    assert not (tmp_path / "tuned.json").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "goal: expected one of --min-speedup, --min-psnr"),
        (["--min-speedup", "1.5", "--min-psnr", "35"], "got 2 of them (min-speedup, min-psnr)"),
        (["--min-speedup", "0.9"], "min-speedup: expected a number above 1"),
        (["--min-ssim", "3"], "min-ssim: expected a number above 0 and at most 1, got 3"),
        (["--min-speedup", "1.5", "--within", "soon"], "within: expected a duration"),
        (["--min-speedup", "1.5", "--out", "tuned.txt"], "out: expected a file ending in .json"),
        (["--min-speedup", "1.5", "--metric", "fid"], "metric: expected one of psnr"),
    ],
)
def test_nonsense_is_one_line(given: list[str], words: str, capsys) -> None:
    assert main(["tune", *given]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1


# --- --settings -----------------------------------------------------------------------------------

CONFIG = ToMeConfig(ratio=0.25, proportional=True)


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """Settings that were found for the tiny pipeline at its own size with 4 steps."""
    path = tmp_path / "found.json"
    about = {"found_for": {"model": "UNet2DConditionModel", "height": 16, "width": 16, "steps": 4}}
    path.write_text(json.dumps({"version": 1, "settings": CONFIG.to_dict(), "tuned": about}))
    return path


def call(*given: object):
    return CliRunner().invoke(app, [*map(str, given)])


def test_inspect_and_generate_apply_a_file(model, tuned, tmp_path) -> None:
    shown = call("inspect", model, "--settings", tuned, "--steps", 4, "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["merging"] == json.loads(json.dumps(CONFIG.to_dict()))
    assert "found for" not in shown.stderr
    done = call("generate", "a boat", "--model", model, "--settings", tuned, "--steps", 4, "--device", "cpu",
                "--repeat", 1, "--no-compare", "--out", tmp_path / "out")  # fmt: skip
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "out" / "run.json").read_text())["conditions"]["config"]
    assert ToMeConfig.from_dict(config) == CONFIG


def test_another_size_or_number_of_steps_is_said(model, tuned) -> None:
    shown = call("inspect", model, "--settings", tuned, "--steps", 8, "--size", 64)
    assert shown.exit_code == 0, shown.output
    assert "found for latents of 16 × 16, not 32 × 32 and for 4 steps, not 8" in shown.stderr


def test_a_setting_of_the_command_line_replaces_that_of_the_file(model, tuned) -> None:
    shown = call("inspect", model, "--settings", tuned, "--ratio", 0.5, "--json")
    assert json.loads(shown.stdout)["merging"]["ratio"] == 0.5
    assert json.loads(shown.stdout)["merging"]["proportional"] is True


def test_a_file_and_a_method_contradict_each_other(model, tuned) -> None:
    error = call("inspect", model, "--settings", tuned, "--method", "sito").exception
    assert isinstance(error, ConfigError)
    assert "leave out --method sito" in str(error)


@pytest.mark.parametrize("name", ["bench", "evaluate"])
def test_bench_and_evaluate_take_a_file_as_a_variant(name, model, tuned, monkeypatch) -> None:
    module = importlib.import_module(f"tokenmerge_tools.cli.{name}")
    seen = []

    def stop(options: object, *arguments: object, **named: object) -> None:
        seen.append(options.variants)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_grid" if name == "bench" else "run_evaluate", stop)
    given = [name, "--model", model, "--settings", tuned, "--steps", 8]
    given += ["--prompts", tuned] if name == "evaluate" else []
    result = call(*given)
    assert seen == [("tome:ratio=0.25,proportional=True",)], result.output
    assert "found for 4 steps, not 8" in result.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot read settings"),
        ('{"version": 1, "settings": {"ratio": 9}}', "ratio: expected"),
        (
            '{"version": 1, "settings": {}, "tuned": 3}',
            "tuned.found_for: expected an object with",
        ),
        (
            '{"version": 1, "settings": {}, "tuned": {"found_for": {"model": "U", "height": 0, "width": 1, '
            '"steps": 4}}}',
            "tuned.found_for.height: expected an integer ≥ 1, got 0",
        ),
        (
            '{"version": 1, "settings": {}, "tuned": {"found_for": {"model": 5, "height": 1, "width": 1, '
            '"steps": 4}}}',
            "tuned.found_for.model: expected the name of a class, got 5",
        ),
        ('{"version": 1, "settings": {}, "other": {}}', "content: expected an object"),
    ],
)
def test_a_bad_file_is_named(text: str, words: str, tmp_path: Path, pipe) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    error = call("inspect", "--settings", path).exception
    assert isinstance(error, ConfigError)
    assert "bad.json" in str(error)
    assert words in str(error)
    with pytest.raises(ConfigError, match=r"bad\.json"):
        apply_token_merging(pipe, path)


# --- in Python ------------------------------------------------------------------------------------


def draw(pipe, side: int = 32, steps: int = 4):
    return pipe("a boat", height=side, width=side, num_inference_steps=steps, output_type="latent",
                generator=torch.Generator().manual_seed(0)).images  # fmt: skip


@pytest.fixture
def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_a_file_merges_as_its_settings_do(quiet, tuned, tmp_path) -> None:
    plain = tmp_path / "plain.json"
    save_config(CONFIG, plain)
    pictures = []
    for config in (CONFIG, tuned, str(tuned), plain):
        patch = apply_token_merging(quiet, config)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pictures.append(draw(quiet))
        patch.remove()
    assert all(torch.equal(pictures[0], other) for other in pictures[1:])
    assert not torch.equal(draw(quiet), pictures[0])


def test_another_size_or_number_of_steps_warns_once(quiet, tuned) -> None:
    patch = apply_token_merging(quiet, tuned)
    for side, steps, words in (
        (64, 4, "latents of 16 × 16, not 32 × 32;"),
        (32, 2, "4 steps, not 2;"),
        (64, 2, "latents of 16 × 16, not 32 × 32 and for 4 steps, not 2;"),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            draw(quiet, side, steps)
        (one,) = caught
        assert f"found for {words}" in str(one.message)
    patch.remove()


def test_another_class_warns_when_it_is_applied(quiet, tuned) -> None:
    tuned.write_text(tuned.read_text().replace("UNet2DConditionModel", "SD3Transformer2DModel"))
    with pytest.warns(UserWarning, match="SD3Transformer2DModel, not UNet2DConditionModel"):
        patch = apply_token_merging(quiet, tuned)
    patch.remove()
