from __future__ import annotations

import json
from collections import Counter

import pytest
from PIL import Image
from tools.tests import made_up_studio

from tokenmerge import apply_token_merging
from tokenmerge.config import Tuned, load_settings
from tokenmerge.errors import ConfigError
from tokenmerge_tools.records.file import ResultsFile
from tokenmerge_tools.records.kinds import TuneRecord
from tokenmerge_tools.tune.result import answer, tuned_table, write_result
from tokenmerge_tools.tune.runner import tune, variant_of
from tokenmerge_tools.tune.speeds import closeness_of, fastest, is_kept

LADDER = [1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2.0, 2.2, 2.5, 3.0, 3.5, 4.0]


@pytest.mark.parametrize("number", range(len(LADDER) + 1))
def test_bisection_finds_the_highest_speed_that_keeps_the_closeness(number: int) -> None:
    asked = []

    def keeps(speed: float) -> bool:
        asked.append(speed)
        return LADDER.index(speed) < number

    assert fastest(LADDER, keeps) == (LADDER[number - 1] if number else None)
    assert len(asked) == len(set(asked)) <= 4


def test_few_prompts_must_be_further_from_the_goal() -> None:
    few = closeness_of([36.0, 40.0] * 2, "psnr")
    many = closeness_of([36.0, 40.0] * 20, "psnr")
    assert few.mean == many.mean == 38.0
    assert few.kept < many.kept < 38.0
    assert is_kept(many, 35.0, "psnr")
    assert not is_kept(few, 35.0, "psnr")
    far = closeness_of([0.1, 0.2, 0.1, 0.2], "lpips")  # lower is closer
    assert far.kept > far.mean
    assert not is_kept(far, 0.2, "lpips")


def test_the_speed_that_keeps_a_psnr_is_found_and_learned(made_up, options) -> None:
    tuning = tune(options(min_psnr=35.0))
    assert tuning.complete
    assert tuning.answer == 1.8  # 55 − 18 + 0 or 1 dB; at 2 it is 35 or 36 dB, and 9 of 10 keep less
    assert all(
        is_kept(tuning.closeness(variant_of(s).label), 35.0, "psnr") == (s <= 1.8) for s in tuning.speeds
    )
    write_result(tuning)
    saved = load_settings(tuning.options.out)
    assert isinstance(saved, Tuned)
    assert saved.speedup == 1.8
    assert saved.errors.prompts == 6
    assert {one.after for one in saved.errors.off} == {4.0}
    assert saved.found_for.weights is not None
    assert answer(tuning).startswith("Take speedup=1.8: 9 of 10 prompts keep at least 3")
    table = tuned_table(tuning)
    assert [row.cells[0] for row in table.rows if row.best] == ["1.8, chosen"]
    assert all(" steps: 20.5 dB (" in row.cells[-1] for row in table.rows)
    columns = len(tuning.speeds) + 2  # dense, each speed, and fewer steps
    with Image.open(tuning.options.strip) as strip:
        assert strip.width == 2 * 24 + columns * 32 + (columns - 1) * 16


def test_a_speed_can_be_measured_instead(made_up, options) -> None:
    tuning = tune(options(speedup=2.0))
    assert tuning.speeds == [2.0]
    assert answer(tuning).startswith("Measured speedup=2: 9 of 10 prompts keep at least 34.")
    assert {name.split()[0] for name, _ in made_up.drawn} == {"dense", "auto", "fewer-steps"}


def test_where_no_speed_keeps_the_goal_the_file_stands_for_dense(made_up, options) -> None:
    tuning = tune(options(min_psnr=60.0))
    assert tuning.answer is None
    assert not tuning.reaches
    assert answer(tuning).startswith("No speed that was tried keeps 60.0 dB in 9 of 10 prompts")
    write_result(tuning)
    assert load_settings(tuning.options.out).speedup == 1.0


def test_a_run_that_was_killed_continues_without_losing_an_image(made_up, options, tmp_path) -> None:
    whole = tune(options(out=tmp_path / "whole" / "tuned.json"))
    total = len(made_up.drawn)
    for after in (1, 9, total - 1):
        made_up.drawn.clear()
        again = options(out=tmp_path / f"killed-{after}" / "tuned.json")
        made_up.stop = after, SystemExit("killed")
        with pytest.raises(SystemExit):
            tune(again)
        made_up.stop = None
        continued = tune(again)
        assert max(Counter(made_up.drawn).values()) == 1  # nothing is drawn twice
        assert len(made_up.drawn) == total
        assert continued.answer == whole.answer
        assert continued.errors() == whole.errors()


def test_another_goal_uses_the_same_images(made_up, options) -> None:
    tune(options(min_psnr=35.0))
    before = set(made_up.drawn)
    made_up.drawn.clear()
    tune(options(min_psnr=38.0))
    assert not set(made_up.drawn) & before


def test_ctrl_c_keeps_and_reports_what_it_has(made_up, options) -> None:
    made_up.stop = 15, KeyboardInterrupt()
    tuning = tune(options())
    assert not tuning.complete
    assert len(tuning.speeds) == 1
    write_result(tuning)
    assert json.loads(tuning.options.out.read_text())["measured"]["complete"] is False
    assert tuned_table(tuning).rows[0].cells[-1] == "–"  # fewer steps are not all drawn


def test_two_runs_do_not_write_to_one_file(made_up, options) -> None:
    with (
        ResultsFile(options().records, TuneRecord),
        pytest.raises(ConfigError, match="another run is writing"),
    ):
        tune(options())


def test_a_default_method_that_cannot_run_is_an_error(options, monkeypatch) -> None:
    """It runs dense, but fails where it is patched, with an error of another library."""

    def fails(*_: object, **named: object) -> None:
        raise RuntimeError("no kernel for this layer.\nA traceback")

    monkeypatch.setattr("tokenmerge_tools.variants.contexts.apply_token_merging", fails)
    words = "the default method cannot run here: no kernel for this layer; change --size, --steps, --dtype or"
    with pytest.raises(ConfigError, match=f"^{words} --model$"):
        tune(options(steps=4, items=4, speedup=1.2))
    assert not options().out.exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"min_psnr": 35.0, "speedup": 2.0}, "min-psnr, speedup: expected one goal, got 2"),
        ({"speedup": 0.9}, "speedup: expected a number above 1"),
        ({"lpips": 1.5}, "lpips: expected a number above 0 and below 1"),
        ({"items": 3}, "items: expected an integer ≥ 4"),
        ({"steps": 1}, "steps: expected at least 2"),
    ],
)
def test_options_are_checked(options, given, words) -> None:
    with pytest.raises(ConfigError, match=words):
        options(**given)


@pytest.mark.slow
def test_a_tiny_pipeline_is_tuned_and_the_file_is_applied(options, pipe, monkeypatch) -> None:
    monkeypatch.setattr(made_up_studio.drawing, "load_pipeline_for", lambda *_: pipe)
    tuning = tune(options(speedup=1.3, items=4, steps=6))
    write_result(tuning)
    patch = apply_token_merging(pipe, tuning.options.out)
    assert "measured on this model with 4 prompts" in patch.report(height=32, width=32, steps=6).estimated
    patch.remove()
