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
from tools.tests import made_up_studio
from typer.testing import CliRunner

from tokenmerge import ConfigError, StepReuse, ToMeConfig, apply_token_merging
from tokenmerge.config import FoundFor, MergeSharing, SavedSettings, plan_content, save_config
from tokenmerge.default_method import settings_for
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
            "--items", "4", "--within", "10h", "--out", str(out)]  # fmt: skip


def test_the_command_prints_a_table_and_the_line_to_paste(made_up, arguments, tmp_path, capsys) -> None:
    assert main([*arguments, "--speedup", "1.5"]) == 0
    printed = capsys.readouterr()
    assert "speed-up of 1.5" in printed.out
    assert "chosen" in printed.out
    assert "fewer-steps" in printed.out
    assert re.search(r"The best of \d+ plans is ahead by \+\d", printed.out)
    out = tmp_path / "tuned.json"
    assert f"in Python: tokenmerge.apply_token_merging(pipe, {str(out)!r})" in printed.out
    assert "best so far" in printed.err
    assert "best so far" not in printed.out
    assert "so the search can draw about" in printed.err
    for suffix in (".json", ".jsonl"):
        assert out.with_suffix(suffix).exists()


def test_a_speed_up_out_of_reach_has_an_exit_code_of_its_own(made_up, arguments, capsys) -> None:
    assert main([*arguments, "--speedup", "40"]) == command.GOAL_NOT_REACHED == 3
    assert "speedup=40 cannot be reached here: at most" in capsys.readouterr().out


def test_ctrl_c_reports_what_it_has(made_up, arguments, tmp_path, capsys) -> None:
    made_up.stop = 5, KeyboardInterrupt()
    assert main([*arguments, "--speedup", "1.5"]) == 130
    printed = capsys.readouterr()
    assert "chosen" in printed.out
    assert printed.err.endswith("tokenmerge: interrupted; finished results are kept\n")
    assert json.loads((tmp_path / "tuned.json").read_text())["measured"]["complete"] is False


def test_a_run_without_time_says_so(made_up, arguments, capsys) -> None:
    where = arguments.index("--within")
    assert main([*arguments[:where], "--within", "0.000001s", *arguments[where + 2 :]]) == 0
    printed = capsys.readouterr()
    assert "that is too few for a search" in printed.err
    assert re.search(r"Not enough time: only 0 plans .* so this was no search\. Give --within", printed.out)


@pytest.mark.parametrize("within", ["0.000001s", "10h"])
def test_where_every_plan_fails_nobody_is_told_to_run_it_again(
    made_up, arguments, tmp_path, capsys, within: str
) -> None:
    class Everything(tuple):
        def __contains__(self, name: object) -> bool:
            return True

    made_up.failing = Everything()
    where = arguments.index("--within") + 1
    assert main([*arguments[:where], within, *arguments[where + 1 :], "--speedup", "1.5"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    last = printed.err.splitlines()[-1]
    assert last.startswith(
        "tokenmerge: the default method cannot run here: it is made to fail; change --size"
    )
    assert "again" not in printed.err
    assert "--within" not in last
    assert not (tmp_path / "tuned.json").exists()


def test_ctrl_c_before_the_first_picture_writes_no_plan(made_up, arguments, tmp_path, capsys) -> None:
    made_up.stop = 0, KeyboardInterrupt()
    assert main([*arguments, "--speedup", "1.5"]) == 130
    assert "nothing was compared yet; run the same command again" in capsys.readouterr().err
    assert not (tmp_path / "tuned.json").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--speedup", "0.9"], "speedup: expected a number above 1"),
        (["--within", "soon"], "within: expected a duration"),
        (["--out", "tuned.txt"], "out: expected a file ending in .json"),
        (["--metric", "fid"], "metric: expected one of 'psnr'"),
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


PLAN = ToMeConfig(
    ratio=0.25,
    planner="tiled",
    proportional=True,
    merge_sharing=MergeSharing(blocks=True),
    reuse=StepReuse(full_steps=(0, 0.33, 1), shallow_steps=(0.67,)),
)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan for the tiny pipeline at its own size in 4 steps with DDIM at guidance 7.5."""
    path = tmp_path / "plan.json"
    found_for = FoundFor("UNet2DConditionModel", 16, 16, 4, "DDIMScheduler", 7.5)
    path.write_text(json.dumps(plan_content(SavedSettings(PLAN, found_for, 1.2))))
    return path


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
def test_a_plan_is_used_for_what_it_was_found_for(model, plan) -> None:
    for given in ((), ("--size", 32, "--guidance", 7.5)):
        shown = call("inspect", model, "--settings", plan, "--steps", 4, *given, "--json")
        assert shown.exit_code == 0, shown.output
        assert ToMeConfig.from_dict(json.loads(shown.stdout)["merging"]) == PLAN
        assert "found for" not in shown.stderr


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--steps", 8), "4 steps, not 8"),
        (("--steps", 4, "--size", 64), "latents of 16 × 16, not 32 × 32"),
        (("--steps", 4, "--guidance", 3), "guidance 7.5, not 3"),
    ],
)
def test_elsewhere_the_default_method_takes_the_place_of_a_plan(model, plan, given, words) -> None:
    rule = call("inspect", model, "--speedup", 1.2, *given, "--json")
    shown = call("inspect", model, "--settings", plan, *given, "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["merging"] == json.loads(rule.stdout)["merging"]
    assert f"plan was found for {words}, so the default method runs with speedup=1.2" in shown.stderr


@pytest.mark.usefixtures("uncounted")
@pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")  # diffusers
def test_another_solver_takes_the_place_of_a_plan_too(model, plan, tmp_path) -> None:
    done = call("generate", "a boat", "--model", model, "--settings", plan, "--steps", 4, "--device", "cpu",
                "--scheduler", "euler", "--repeat", 1, "--no-compare", "--out", tmp_path / "out")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "found for DDIMScheduler, not EulerDiscreteScheduler" in done.stderr


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


def test_evaluate_takes_the_default_method_where_a_plan_is_for_others(model, plan, monkeypatch) -> None:
    module = importlib.import_module("tokenmerge_tools.cli.evaluate")
    seen = []

    def stop(options: object, *arguments: object, **named: object) -> None:
        seen.append(options.variants)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_evaluate", stop)
    given = ["evaluate", "--model", model, "--settings", plan, "--prompts", plan]
    for steps in (4, 8):
        call(*given, "--steps", steps)
    assert seen == [
        (
            "tome:ratio=0.25,planner=tiled,proportional=True,merge_sharing.blocks=True,"
            "reuse.full_steps=[0.0, 0.33, 1.0],reuse.shallow_steps=[0.67]",
        ),
        ("auto:speedup=1.2",),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot read settings"),
        ('{"version": 1, "settings": {"ratio": 9}}', "ratio: expected"),
        ('{"version": 1, "settings": {}, "other": {}}', "content: expected an object"),
        ('{"version": 2, "settings": {}}', "version: expected 1, the one that this release reads, got 2"),
        (
            '{"version": 3, "speedup": 2, "plan": {}, "for": {}}',
            "version: expected 2, the one that this release",
        ),
        ('{"version": 2, "speedup": 0.5, "plan": {}, "for": {}}', "speedup: expected a number ≥ 1"),
        ('{"version": 2, "speedup": 2, "plan": 3, "for": {}}', "plan: expected settings by name"),
        (
            '{"version": 2, "speedup": 2, "plan": {}, "for": {}}',
            "for: expected an object with the keys model",
        ),
        (
            '{"version": 2, "speedup": 2, "plan": {}, "for": {"model": "U", "height": 1, "width": 1, '
            '"steps": 4, "guidance": -1}}',
            "for.guidance: expected a number ≥ 0",
        ),
        (
            '{"version": 2, "speedup": 2, "plan": {}, "for": {"model": "U", "height": 0, "width": 1, '
            '"steps": 4}}',
            "for.height: expected an integer ≥ 1, got 0",
        ),
        (
            '{"version": 2, "speedup": 2, "plan": {}, "for": {"model": 5, "height": 1, "width": 1, '
            '"steps": 4}}',
            "for.model: expected the name of a class, got 5",
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


def test_a_model_alone_gets_the_settings_of_a_plan_and_another_class_warns(quiet, plan) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert apply_token_merging(quiet.unet, plan).config == PLAN
    plan.write_text(plan.read_text().replace("UNet2DConditionModel", "SD3Transformer2DModel"))
    with pytest.warns(UserWarning, match="SD3Transformer2DModel, not UNet2DConditionModel") as caught:
        patch = apply_token_merging(quiet.unet, plan)
    assert caught[0].filename == __file__
    patch.remove()


def rule_of(pipe, side: int = 32, steps: int = 4, guidance: float = 7.5) -> ToMeConfig:
    return settings_for(pipe, 1.2, side // 2, side // 2, steps, guidance)


def drawn_with(pipe, **options: object) -> tuple[ToMeConfig, list[str]]:
    """The settings of a generation with a patched pipeline, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        draw(pipe, **options)
    return pipe.unet.__dict__[STATE].last_run.config, [
        str(one.message) for one in caught if "found for" in str(one.message)
    ]


def test_a_plan_runs_where_it_was_found_and_the_default_method_elsewhere(quiet, plan) -> None:
    patch = apply_token_merging(quiet, plan)
    assert drawn_with(quiet) == (PLAN, [])
    assert patch.config == PLAN
    config, said = drawn_with(quiet, steps=8)
    assert config == rule_of(quiet, steps=8) != PLAN
    assert len(said) == 1
    assert "this plan was found for 4 steps, not 8, so the default method runs with speedup=1.2" in said[0]
    assert drawn_with(quiet, steps=8)[1] == []  # it is said once
    config, said = drawn_with(quiet, side=64)
    assert config == rule_of(quiet, side=64)
    assert "latents of 16 × 16, not 32 × 32" in said[0]
    config, said = drawn_with(quiet, guidance_scale=3.0)
    assert config == rule_of(quiet, guidance=3.0)
    assert "guidance 7.5, not 3" in said[0]
    assert drawn_with(quiet) == (PLAN, [])
    quiet.scheduler = EulerDiscreteScheduler.from_config(quiet.scheduler.config)
    config, said = drawn_with(quiet)
    assert config == rule_of(quiet)
    assert "DDIMScheduler, not EulerDiscreteScheduler" in said[0]
    patch.remove()


def test_a_plan_draws_what_its_settings_draw(quiet, plan) -> None:
    pictures = []
    for config in (PLAN, plan):
        patch = apply_token_merging(quiet, config)
        pictures.append(draw(quiet))
        patch.remove()
    assert torch.equal(*pictures)


def test_a_plan_for_another_class_is_the_default_method(quiet, plan) -> None:
    plan.write_text(plan.read_text().replace("UNet2DConditionModel", "SD3Transformer2DModel"))
    patch = apply_token_merging(quiet, plan)
    config, said = drawn_with(quiet)
    assert config == rule_of(quiet)
    assert "SD3Transformer2DModel, not UNet2DConditionModel" in said[0]
    patch.remove()


def test_a_copy_of_a_model_keeps_its_plan_and_not_the_pipeline(quiet, plan) -> None:
    patch = apply_token_merging(quiet, plan)
    copied = copy.deepcopy(quiet.unet.__dict__[STATE].default)
    assert copied.pipe is None
    assert copied.settings(copied.facts_at(None, 4, 7.5)) == PLAN
    patch.remove()
