from __future__ import annotations

import math
import re
import threading
import time

import numpy as np
import pytest
import tiny_pipeline
from diffusers import DiffusionPipeline

from tokenmerge.errors import ConfigError
from tokenmerge_tools.method_spec import MethodSpec
from tokenmerge_tools.pipelines.options import GenerateOptions
from tokenmerge_tools.play import trials
from tokenmerge_tools.play.texts import details, python_lines
from tokenmerge_tools.play.trials import Stop, StoppedError, Trials

STEPS = 4


@pytest.fixture(scope="module")
def studio():
    return Trials()


def options(folder, method="tome", ratio=0.5, **changes):
    merging = MethodSpec(method, {} if method == "auto" else {"ratio": ratio})
    given = {"prompt": "a red apple", "model": str(folder), "steps": STEPS, "seed": 3, "guidance": 2.5}
    return GenerateOptions(**{**given, "merging": merging, **changes})


def draw(studio, options, on_progress=lambda _: None, stop=None):
    return studio.draw(options, on_progress, stop or Stop())


def same(one, other):
    return np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "tome", "tomesd", "sito"])
def test_the_python_lines_draw_the_merged_picture(studio, folder, method):
    trial = draw(studio, options(folder, method, size=(48, 32), steps=12))  # auto reuses steps from 10 on
    pipe = DiffusionPipeline.from_pretrained(folder, safety_checker=None)
    pipe.set_progress_bar_config(disable=True)
    names = {"pipe": pipe}
    lines = python_lines(trial.options)
    exec(lines, names)
    assert same(names["image"], trial.merged)
    names["patch"].remove()
    exec(re.sub("^patch.*\n", "", lines, flags=re.MULTILINE), names)  # without the line that merges
    assert same(names["image"], trial.dense)
    assert not same(trial.dense, trial.merged)
    assert trial.merged.size == (48, 32)


def test_a_trial_says_what_was_measured(studio, folder):
    trial = draw(studio, options(folder))
    error = (np.asarray(trial.dense) / 255 - np.asarray(trial.merged) / 255) ** 2
    assert trial.psnr == pytest.approx(-10 * np.log10(error.mean()), rel=1e-4)
    assert not trial.identical
    assert trial.dense_seconds > 0
    assert trial.speedup == trial.dense_seconds / trial.merged_seconds
    assert trial.options.size == (tiny_pipeline.SIDE, tiny_pipeline.SIDE)  # the model's own
    assert "256 to 128 tokens" in trial.groups_text  # 16 x 16 latents
    assert "256 → 128 tokens" in details(trial)
    assert trial.groups.size[0] % trial.merged.size[0] == 0


def test_dense_in_as_many_steps_as_take_the_same_time_stands_beside(studio, folder, monkeypatch):
    monkeypatch.setattr(trials, "as_long_as", lambda steps, share, speedup: 3)
    trial = draw(studio, options(folder))
    assert trial.fewer.steps == 3
    assert same(trial.fewer.image, draw(studio, options(folder, steps=3)).dense)
    assert 0 < trial.fewer.psnr < math.inf
    monkeypatch.setattr(trials, "as_long_as", lambda steps, share, speedup: None)
    assert draw(studio, options(folder)).fewer is None


def test_at_ratio_zero_the_pictures_are_identical(studio, folder):
    draw(studio, options(folder))  # nothing of this patch may stay
    assert draw(studio, options(folder, ratio=0)).identical


def test_progress_counts_the_steps_of_both_pictures(studio, folder):
    seen = []
    draw(studio, options(folder), seen.append)
    for variant in ("dense", "tokenmerge"):
        own = [(now.done, now.total) for now in seen if now.part == variant]
        assert own == [(done, STEPS) for done in range(1, STEPS + 1)]


@pytest.mark.parametrize(("part", "step"), [("dense", 1), ("tokenmerge", 2)])
def test_a_stopped_trial_ends_after_its_step_and_leaves_nothing(studio, folder, part, step):
    before = draw(studio, options(folder))
    stop, seen = Stop(), []

    def ask(now):
        seen.append(now)
        stop.asked = (now.part, now.done) == (part, step)

    with pytest.raises(StoppedError):
        draw(studio, options(folder), ask, stop)
    assert (seen[-1].part, seen[-1].done) == (part, step)
    after = draw(studio, options(folder))
    assert same(after.dense, before.dense)
    assert same(after.merged, before.merged)


def test_a_trial_that_was_stopped_while_it_waited_draws_nothing(studio, folder):
    stop, seen = Stop(), []
    stop.asked = True
    with pytest.raises(StoppedError):
        draw(studio, options(folder), seen.append, stop)
    assert seen == []


@pytest.mark.parametrize("part", ["loading the model", "dense: warming up", "dense", "tokenmerge"])
def test_a_trial_ends_when_its_visitor_leaves(studio, folder, part):
    there = True
    seen = []

    def leave(now):
        nonlocal there
        seen.append(now.part)
        there = now.part != part

    with pytest.raises(StoppedError):
        draw(studio, options(folder), leave, Stop(lambda: there))
    assert seen[-1] == part
    assert seen.count(part) == 1


def test_a_trial_waits_some_seconds_for_its_visitor(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stop = Stop(lambda: False)
    stop.check()
    now += 60
    with pytest.raises(StoppedError):
        stop.check()


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": (33, 32)}, "size: this model needs multiples of 2 pixels, got 33x32; use 32x32"),
        ({"ratio": 0.9}, "ratio"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_drawn(folder, studio, loaded, changes, message):
    studio = studio if loaded else Trials()
    seen = []
    with pytest.raises(ConfigError, match=message):
        draw(studio, options(folder, **changes), seen.append)
    assert {now.part for now in seen} <= {"loading the model"}


def test_one_trial_at_a_time(studio, folder):
    parts = []

    def run(name):
        draw(studio, options(folder), lambda now: parts.append((name, now.part)))

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    order = [name for name, _ in parts]
    assert order == sorted(order, key=order.index)  # all of one, then all of the other
    assert len(set(order)) == 2


@pytest.mark.usefixtures("large_grids_alone")
def test_what_the_model_warns_of_is_kept_with_the_trial(studio, folder):
    # With two steps none is skipped, and 256 tokens are too few for the default method to merge.
    trial = draw(studio, options(folder, "auto", steps=2))
    assert any("dense" in warning for warning in trial.warnings)
    assert trial.identical
