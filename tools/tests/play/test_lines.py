from __future__ import annotations

import importlib
import shlex

import pytest
from tools.tests.play.made_up_trial import trial

from tokenmerge_tools.cli import main
from tokenmerge_tools.play.texts import python_lines, tune_command


@pytest.mark.parametrize(
    ("method", "first"),
    [
        ("auto", "patch = tokenmerge.apply_token_merging(pipe, speedup=2.0)"),
        ("tome", "patch = tokenmerge.apply_token_merging(pipe, tokenmerge.ToMeConfig(ratio=0.25))"),
        ("toma", "patch = tokenmerge.apply_token_merging(pipe, 'toma', ratio=0.25)"),
    ],
)
def test_the_first_python_line_after_the_imports_merges_with_the_method(method, first):
    lines = python_lines(trial(method=method, ratio=0.25).options).splitlines()
    assert lines[:4] == ["import tokenmerge", "import torch", "", first]


def test_a_ratio_of_zero_is_a_ratio():
    assert "merging(pipe, 'toma', ratio=0)" in python_lines(trial(method="toma", ratio=0).options)


def test_a_prompt_with_quotes_stays_one_string():
    prompt = "it's \"red\"\n'); print('"
    text = python_lines(trial(prompt=prompt).options)
    seen = []
    names = {"pipe": lambda prompt, **_: seen.append(prompt)}
    call = text.splitlines()[-1].removeprefix("image = ").replace(".images[0]", "")
    exec(call, {**names, "noise": None})
    assert seen == [prompt]


@pytest.fixture
def tuned(monkeypatch):
    """What `tokenmerge tune` understands of a command."""
    seen = []

    def stop(options, *_, **__):
        seen.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("tokenmerge_tools.cli.tune"), "run_tune", stop)

    def read(command):
        program, *arguments = shlex.split(command)
        assert program == "tokenmerge"
        assert main(arguments) == 130
        return seen[-1]

    return read


def test_tune_gets_the_settings_of_the_trial(tuned):
    options = tuned(
        tune_command(
            trial(size=(192, 128), steps=9, guidance=2.5, dtype="bf16", device="cpu", seconds=(3, 2))
        )
    )
    assert (options.model, options.size, options.steps) == ("emoji-unet", (192, 128), 9)
    assert (options.guidance, options.dtype, options.device) == (2.5, "bf16", "cpu")
    assert options.speedup == 1.5
    assert options.prompts is None


def test_the_wanted_speed_is_not_above_that_of_the_trial(tuned):
    assert tuned(tune_command(trial(seconds=(1.999, 1)))).speedup == 1.95


def test_a_trial_that_was_not_faster_asks_for_a_moderate_speed(tuned):
    assert tuned(tune_command(trial(seconds=(1, 1)))).speedup == 1.5


def test_a_model_that_is_not_bundled_needs_prompts(tuned):
    options = tuned(tune_command(trial(model="./my model")))
    assert str(options.prompts) == "prompts.txt"
    assert options.model == "./my model"
