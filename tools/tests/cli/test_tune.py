"""``tokenmerge tune``, and ``--settings`` in the other commands."""

from __future__ import annotations

import copy
import importlib
import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from diffusers import EulerDiscreteScheduler
from tests.tuned import ERRORS, tuned, tuned_file
from tools.tests import made_up_studio
from typer.testing import CliRunner

from tokenmerge import ConfigError, ToMeConfig, apply_token_merging
from tokenmerge.config import save_config
from tokenmerge.runtime.memory.state import STATE
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
            "--items", "4", "--out", str(out)]  # fmt: skip


def test_the_command_prints_a_table_and_the_answer(made_up, arguments, tmp_path, capsys) -> None:
    assert main([*arguments, "--min-psnr", "35"]) == 0
    printed = capsys.readouterr()
    assert "fewer steps of the same time" in printed.out
    assert re.search(r"Take speedup=1\.\d: 9 of 10 prompts keep at least 3\d\.\d dB to dense", printed.out)
    out = tmp_path / "tuned.json"
    assert f"in Python: tokenmerge.apply_token_merging(pipe, {str(out)!r})" in printed.out
    for suffix in (".json", ".jsonl", ".png"):
        assert out.with_suffix(suffix).exists()


def test_a_speed_up_out_of_reach_has_an_exit_code_of_its_own(made_up, arguments, capsys) -> None:
    assert main([*arguments, "--speedup", "40"]) == command.GOAL_NOT_REACHED == 3
    assert "speedup=40 cannot be reached here: at most" in capsys.readouterr().out


def test_so_has_a_closeness_that_no_speed_keeps(made_up, arguments, capsys) -> None:
    assert main([*arguments, "--min-psnr", "60"]) == command.GOAL_NOT_REACHED
    assert "No speed that was tried keeps 60.0 dB in 9 of 10 prompts" in capsys.readouterr().out


def test_ctrl_c_reports_what_it_has(made_up, arguments, tmp_path, capsys) -> None:
    made_up.stop = 9, KeyboardInterrupt()
    assert main([*arguments, "--speedup", "1.5"]) == 130
    printed = capsys.readouterr()
    assert "Measured speedup=1.5" in printed.out
    assert printed.err.endswith("tokenmerge: interrupted; finished results are kept\n")
    assert json.loads((tmp_path / "tuned.json").read_text())["measured"]["complete"] is False


def test_ctrl_c_before_the_first_speed_writes_no_file(made_up, arguments, tmp_path, capsys) -> None:
    made_up.stop = 3, KeyboardInterrupt()
    assert main([*arguments, "--speedup", "1.5"]) == 130
    assert "no speed was drawn with all prompts yet; run the same command" in capsys.readouterr().err
    assert not (tmp_path / "tuned.json").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--speedup", "0.9"], "speedup: expected a number above 1"),
        (["--speedup", "2", "--min-psnr", "35"], "min-psnr, speedup: expected one goal"),
        (["--out", "tuned.txt"], "out: expected a file ending in .json"),
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
def saved(tmp_path: Path) -> Path:
    """A file of settings."""
    path = tmp_path / "saved.json"
    save_config(CONFIG, path)
    return path


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A file of ``tokenmerge tune`` for the tiny pipeline at its own size in 4 steps at guidance 7.5."""
    return tuned_file(tmp_path, tuned(1.2, 4, scheduler="DDIMScheduler", guidance=7.5))


def call(*given: object):
    return CliRunner().invoke(app, [*map(str, given)])


@pytest.mark.usefixtures("uncounted")
def test_inspect_and_generate_apply_a_file(model, saved, tmp_path) -> None:
    shown = call("inspect", model, "--settings", saved, "--steps", 4, "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["merging"] == json.loads(json.dumps(CONFIG.to_dict()))
    assert "found for" not in shown.stderr
    done = call("generate", "a boat", "--model", model, "--settings", saved, "--steps", 4, "--device", "cpu",
                "--repeat", 1, "--no-compare", "--out", tmp_path / "out")  # fmt: skip
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "out" / "run.json").read_text())["conditions"]["config"]
    assert ToMeConfig.from_dict(config) == CONFIG


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--steps", 4), ""),
        (("--steps", 8), "4 steps, not 8"),
        (("--steps", 4, "--size", 64), "latents of 16 × 16, not 32 × 32"),
        (("--steps", 4, "--guidance", 3), "guidance 7.5, not 3"),
    ],
)
def test_a_file_of_tune_is_the_default_method_with_a_note_elsewhere(model, measured, given, words) -> None:
    rule = call("inspect", model, "--speedup", 1.2, *given, "--json")
    shown = call("inspect", model, "--settings", measured, *given, "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["merging"] == json.loads(rule.stdout)["merging"]
    assert ("tokenmerge tune measured" in shown.stderr) == bool(words)
    assert words in shown.stderr


@pytest.mark.usefixtures("uncounted")
@pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")  # diffusers
def test_generate_follows_a_file_of_tune(model, measured, tmp_path) -> None:
    given = ["--settings", measured, "--steps", 4, "--device", "cpu", "--min-psnr", 20, "--repeat", 1]
    done = call("generate", "a boat", "--model", model, *given, "--no-compare", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert "tuned.json)" in run["summary"]


@pytest.mark.usefixtures("uncounted")
def test_a_setting_of_the_command_line_replaces_that_of_the_file(model, saved) -> None:
    shown = call("inspect", model, "--settings", saved, "--ratio", 0.5, "--json")
    assert json.loads(shown.stdout)["merging"]["ratio"] == 0.5
    assert json.loads(shown.stdout)["merging"]["proportional"] is True


def test_a_file_and_a_method_contradict_each_other(model, saved) -> None:
    error = call("inspect", model, "--settings", saved, "--method", "sito").exception
    assert isinstance(error, ConfigError)
    assert "leave out --method sito" in str(error)


def test_evaluate_takes_a_file_as_a_variant(model, saved, monkeypatch) -> None:
    module = importlib.import_module("tokenmerge_tools.cli.evaluate")
    seen = []

    def stop(options: object, *arguments: object, **named: object) -> None:
        seen.append(options.variants)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_evaluate", stop)
    given = ["evaluate", "--model", model, "--settings", saved, "--steps", 8, "--prompts", saved]
    result = call(*given)
    assert seen == [("tome:ratio=0.25,proportional=True",)], result.output


def test_evaluate_takes_the_default_method_for_a_file_of_tune(model, measured, monkeypatch) -> None:
    module = importlib.import_module("tokenmerge_tools.cli.evaluate")
    seen = []

    def stop(options: object, *arguments: object, **named: object) -> None:
        seen.append(options.variants)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_evaluate", stop)
    call("evaluate", "--model", model, "--settings", measured, "--prompts", measured, "--steps", 4)
    assert seen == [("auto:speedup=1.2",)]


FOR = '"for": {"model": "U", "height": 1, "width": 1, "steps": 4}'
OFF = '{"speedup": 2, "before": 1, "after": 1}'
ESTIMATES = f'{{"prompts": 4, "off": [{OFF}], "spread_before": 1, "spread_after": 1, "freedom": 3}}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot read settings"),
        ('{"version": 1, "settings": {"ratio": 9}}', "ratio: expected"),
        ('{"version": 1, "settings": {}, "other": {}}', "content: expected an object"),
        ('{"version": 2, "settings": {}}', "version: expected 1, the one that this release reads, got 2"),
        (
            f'{{"version": 4, "speedup": 2, {FOR}, "estimates": {ESTIMATES}}}',
            "version: expected 3, the one that this release",
        ),
        (
            f'{{"version": 3, "speedup": 0.5, {FOR}, "estimates": {ESTIMATES}}}',
            "speedup: expected a number ≥ 1",
        ),
        (f'{{"version": 3, "speedup": 2, {FOR}, "estimates": 3}}', "estimates: expected an object"),
        (
            f'{{"version": 3, "speedup": 2, {FOR}, "estimates": {ESTIMATES.replace("4", "1")}}}',
            "estimates.prompts: expected an integer ≥ 2",
        ),
        (
            f'{{"version": 3, "speedup": 2, {FOR}, "estimates": {ESTIMATES.replace(OFF, "")}}}',
            "estimates.off: expected at least one speed",
        ),
        (
            f'{{"version": 3, "speedup": 2, "for": {{}}, "estimates": {ESTIMATES}}}',
            "for: expected an object with the keys model",
        ),
        (
            f'{{"version": 3, "speedup": 2, {FOR.replace("4", "0")}, "estimates": {ESTIMATES}}}',
            "for.steps: expected an integer ≥ 1",
        ),
        (
            '{"version": 2, "speedup": 1.7, "plan": {"ratio": 0.5}, "for": {}}',
            "run tokenmerge tune again, or write apply_token_merging(pipe, speedup=1.7)",
        ),
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


def draw(pipe, side: int = 32, steps: int = 4, **options: object):
    return pipe("a boat", height=side, width=side, num_inference_steps=steps, output_type="latent",
                generator=torch.Generator().manual_seed(0), **options).images  # fmt: skip


@pytest.fixture
def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_a_file_merges_as_its_settings_do(quiet, saved) -> None:
    pictures = []
    for config in (CONFIG, saved, str(saved)):
        patch = apply_token_merging(quiet, config)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pictures.append(draw(quiet))
        patch.remove()
    assert all(torch.equal(pictures[0], other) for other in pictures[1:])
    assert not torch.equal(draw(quiet), pictures[0])


def test_a_model_alone_gets_the_default_method_for_a_model_alone(quiet, measured) -> None:
    patch = apply_token_merging(quiet.unet, measured)
    plain = patch.config
    patch.remove()
    other = apply_token_merging(quiet.unet, speedup=1.2)
    assert other.config == plain
    other.remove()


@pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")  # diffusers
def test_another_scheduler_is_another_kind_of_generation(quiet, measured) -> None:
    patch = apply_token_merging(quiet, measured)
    draw(quiet)
    assert patch.estimate.prompts == 6
    quiet.scheduler = EulerDiscreteScheduler.from_config(quiet.scheduler.config)
    with pytest.warns(UserWarning, match="measured DDIMScheduler, not EulerDiscreteScheduler"):
        draw(quiet)
    assert patch.estimate.prompts == 0
    patch.remove()


def test_a_copy_of_a_model_keeps_what_was_measured_and_not_the_pipeline(quiet, measured) -> None:
    patch = apply_token_merging(quiet, measured)
    copied = copy.deepcopy(quiet.unet.__dict__[STATE].default)
    assert copied.pipe is None
    assert copied.learned(copied.facts_at(None, 4, 7.5)) == ERRORS
    patch.remove()
