from __future__ import annotations

import copy
import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
import tiny_pipeline
import torch

from tokenmerge import apply_token_merging
from tokenmerge.config import FoundFor, SavedSettings, ToMeConfig, load_settings, plan_content
from tokenmerge.default_method import settings_for
from tokenmerge.errors import ConfigError, NothingToMergeError
from tokenmerge.plans import pays_from
from tokenmerge_tools.drawing import Studio
from tokenmerge_tools.pipelines.loading import denoiser_of
from tokenmerge_tools.tune.plans import SearchedPlan
from tokenmerge_tools.tune.result import tuned_table, verdict, write_result
from tokenmerge_tools.tune.rounds import CannotRunError, Rounds
from tokenmerge_tools.tune.runner import tune, variant_of
from tokenmerge_tools.variants.variant import FEWER_STEPS, Variant, parse_variant

SEARCHED, CHECKED = range(4), range(4, 6)


def test_a_search_finds_a_closer_plan_and_checks_it_on_other_prompts(finished) -> None:
    search = finished
    assert search.complete
    assert search.was_search
    assert search.best != search.rule
    assert search.chosen == search.best
    assert search.counted[1] >= search.counted[0] >= 1.5
    assert {item for _, item in search.snr} == {*SEARCHED}
    assert {look.item for look in search.looks} == {*CHECKED}
    names = {look.name for look in search.looks}
    assert {search.best.name, search.rule.name} < names
    assert any(name.startswith(FEWER_STEPS) for name in names)
    gained, error = search.gain
    assert gained > 0
    assert error == 0


def test_a_search_that_was_killed_continues_without_losing_a_picture(made_up, options, tmp_path) -> None:
    whole = tune(options(out=tmp_path / "whole" / "tuned.json"))
    total = len(made_up.drawn)
    for after in (1, 9, total - 1):
        made_up.drawn.clear()
        again = options(out=tmp_path / f"killed-{after}" / "tuned.json")
        made_up.stop = after, SystemExit("killed")
        with pytest.raises(SystemExit):
            tune(again)
        assert len(made_up.drawn) == after
        made_up.stop = None
        continued = tune(again)
        assert max(Counter(made_up.drawn).values()) == 1  # nothing is drawn twice
        assert len(made_up.drawn) == total
        assert (continued.best, continued.gain) == (whole.best, whole.gain)


@pytest.mark.parametrize("after", [12, -1])
def test_ctrl_c_keeps_and_reports_what_it_has(made_up, options, tmp_path, after: int) -> None:
    if after < 0:  # in the check
        tune(options(out=tmp_path / "whole" / "tuned.json"))
        after += len(made_up.drawn)
        made_up.drawn.clear()
    made_up.stop = after, KeyboardInterrupt()
    search = tune(options())
    assert not search.complete
    assert len(search.snr) + len(search.looks) == after
    write_result(search)
    written = json.loads(search.options.out.read_text())
    assert written["measured"]["complete"] is False
    assert load_settings(search.options.out).config == search.chosen.config
    assert verdict(search)
    tuned_table(search)
    made_up.stop = 0, KeyboardInterrupt()
    assert tune(options()).snr == search.snr  # of the earlier run


def test_a_finished_search_only_reads_its_records(made_up, options) -> None:
    first = tune(options())
    made_up.drawn.clear()
    assert tune(options()).gain == first.gain
    assert made_up.drawn == []


def test_another_speed_up_uses_the_same_pictures(made_up, options) -> None:
    tune(options())
    before = set(made_up.drawn)
    made_up.drawn.clear()
    tune(options(speedup=1.4))
    assert not set(made_up.drawn) & before


def test_a_plan_that_cannot_run_is_noted_and_left_out(made_up, options) -> None:
    best = tune(options(out=options().out.with_name("whole.json"))).best.name
    made_up.failing = (best, "fewer-steps steps=13")
    notes: list[str] = []
    search = tune(options(), on_note=notes.append)
    assert search.best.name != best
    assert not {look.name for look in search.looks} & set(made_up.failing)
    assert f"{best} cannot run here: it is made to fail" in notes


def test_a_rule_that_cannot_run_is_an_error(made_up, options) -> None:
    made_up.stop = 1, KeyboardInterrupt()
    made_up.failing = (tune(options()).rule.name,)
    made_up.stop = None
    with pytest.raises(ConfigError, match="the default method cannot run here: it is made to fail"):
        tune(options(out=options().out.with_name("again.json")))


def test_a_model_that_raises_where_something_merges_is_named(options, monkeypatch) -> None:
    """It runs dense, but fails where it is patched, with an error of another library."""

    def fails(*_: object, **named: object) -> None:
        raise RuntimeError("no kernel for this layer.\nA traceback")

    monkeypatch.setattr("tokenmerge_tools.variants.contexts.merge_in_hosts", fails)
    words = "the default method cannot run here: no kernel for this layer; change --size, --steps, --dtype or"
    with pytest.raises(ConfigError, match=f"^{words} --model$"):
        tune(options(steps=4, items=4))


def test_latents_that_are_not_finite_are_a_reason(studio, monkeypatch) -> None:
    monkeypatch.setattr("tokenmerge_tools.tune.rounds.snr", lambda *_: float("nan"))
    with pytest.raises(CannotRunError, match="are not finite"):
        studio.snr(0, ToMeConfig(ratio=0))


def test_a_run_without_time_says_so_first_and_last(made_up, options) -> None:
    notes: list[str] = []
    search = tune(options(within=1e-9), on_note=notes.append)
    assert search.complete
    assert search.best == search.rule == search.chosen
    assert {look.item for look in search.looks} == {CHECKED[0]}
    assert "so the search can draw about 0 images; that is too few for a search" in notes[0]
    assert "give --within 1min" in notes[0]
    assert verdict(search).startswith("Not enough time: only 0 plans were compared with that of the default")
    assert "so this was no search. Give --within 1min" in verdict(search)


def test_enough_time_is_announced_in_pictures(made_up, options) -> None:
    notes: list[str] = []
    tune(options(), on_note=notes.append)
    assert notes[0].startswith("a dense image takes")
    assert "too few" not in notes[0]


def test_a_plan_that_is_no_closer_on_other_prompts_is_not_chosen(made_up, options) -> None:
    made_up.gains = False
    search = tune(options(items=12))
    assert search.best != search.rule
    gained, error = search.gain
    assert (search.chosen == search.best) == (gained > error)
    looks = [
        dataclasses.replace(look, value=30.0 + (look.name == search.rule.name) + look.item % 2)
        for look in search.looks
    ]
    behind = copy.copy(search)
    behind.looks = looks
    assert behind.chosen == behind.rule
    assert "which is no gain; the file has the plan of the default method" in verdict(behind)
    write_result(behind)
    assert load_settings(behind.options.out).config == behind.rule.config


def test_a_speed_up_out_of_reach_is_said(made_up, options) -> None:
    search = tune(options(speedup=50.0))
    assert not search.reaches
    assert verdict(search).startswith("speedup=50 cannot be reached here: at most ")


def test_the_file_has_the_plan_and_its_signature(finished) -> None:
    search = finished
    write_result(search)
    out = search.options.out
    saved = load_settings(out)
    assert saved.config == search.best.config
    assert saved.speedup == 1.5
    assert saved.found_for == FoundFor("UNet2DConditionModel", 16, 16, 20, "DDIMScheduler", 7.5)
    written = json.loads(out.read_text())
    assert (written["version"], list(written)) == (2, ["version", "speedup", "plan", "for", "measured"])
    assert written["measured"]["conditions"]["versions"]["tokenmerge"]
    assert written["measured"]["pictures"][search.best.name]["prompts"] == len(CHECKED)
    assert out.with_suffix(".jsonl").stat().st_size > 0


def test_the_table_shows_the_plan_the_rule_and_what_is_compared(finished) -> None:
    rows = [row.cells for row in tuned_table(finished).rows]
    assert rows[0][:2] == (finished.best.name, "found, chosen")
    assert rows[1][:2] == (finished.rule.name, "default method")
    assert "fewer-steps steps=13" in {row[0] for row in rows}


def test_a_plan_that_merges_only_at_its_own_size_is_applied_to_a_model(pipe, tmp_path) -> None:
    latent = pipe.unet.config.sample_size
    config = ToMeConfig(ratio=0.5, min_tokens=latent**2 + 1)
    with pytest.raises(NothingToMergeError, match="larger image"):
        apply_token_merging(pipe, config)
    file = tmp_path / "tuned.json"
    found_for = FoundFor("UNet2DConditionModel", 2 * latent, 2 * latent, 20)
    file.write_text(json.dumps(plan_content(SavedSettings(config, found_for, 1.5))))
    patch = apply_token_merging(pipe.unet, str(file))
    side = 2 * tiny_pipeline.SIDE
    pipe("a red apple", side, side, num_inference_steps=20)
    assert patch.report().flops_merged < patch.report().flops_dense
    with pytest.raises(NothingToMergeError, match="larger image"):
        pipe("a red apple", num_inference_steps=20)
    patch.remove()


def test_a_variant_that_merges_only_at_a_larger_size_than_the_model_s_own_can_be_drawn(pipe) -> None:
    config = ToMeConfig(ratio=0.5, min_tokens=pipe.unet.config.sample_size**2 + 1)
    (spec,) = parse_variant(f"tome:min_tokens={config.min_tokens}", (0.5,))
    side = 2 * tiny_pipeline.SIDE

    def draw(drawing) -> torch.Tensor:
        seed = torch.Generator().manual_seed(0)
        options = {"num_inference_steps": 1, "generator": seed, "output_type": "latent"}
        return drawing("a red apple", side, side, **options).images

    dense = draw(pipe)
    with Studio(pipe) as studio:
        studio.add("merged", lambda copied: spec.apply(copied, config))
        assert not torch.equal(draw(studio.pipes["merged"]), dense)


@pytest.fixture
def studio(options, monkeypatch) -> Rounds:
    """The real studio, after a search without time."""
    studios: list[Rounds] = []
    begin = Rounds.__init__

    def remember(self, *arguments, **named) -> None:
        begin(self, *arguments, **named)
        studios.append(self)

    monkeypatch.setattr(Rounds, "__init__", remember)
    search = tune(options(within=1e-9, steps=6, items=4))
    assert {look.name for look in search.looks} >= {search.rule.name}
    assert all(look.seconds > 0 and look.dense_seconds > 0 for look in search.looks)
    assert all(0 < look.value <= 100 for look in search.looks)
    return studios[0]


def test_a_real_studio_is_unchanged_by_what_it_draws(studio: Rounds) -> None:
    types = [type(module) for module in denoiser_of(studio.pipe).modules()]
    plan = SearchedPlan(ToMeConfig(ratio=0.5), "MMsMsM")
    few = Variant(FEWER_STEPS, (("steps", 1),))
    drawn = {plan.name: variant_of(plan.config), few.label: few}
    found = dict(studio.draw(1, drawn, {plan.name: plan.config}, pytest.fail))
    assert list(found) == [plan.name, few.label]
    assert [type(module) for module in denoiser_of(studio.pipe).modules()] == types
    # Merging and fewer steps change the image. Equal images would have 100 dB.
    assert all(one["metrics"]["psnr"] < 100 for one in found.values())


def test_final_latents_are_closer_where_more_steps_are_complete(studio: Rounds) -> None:
    few, many = (SearchedPlan(ToMeConfig(ratio=0), runs).config for runs in ("MMssss", "MMsMsM"))
    assert studio.snr(0, few) < studio.snr(0, many) < 120
    assert studio.snr(0, ToMeConfig(ratio=0)) == 120  # the same latents
    assert studio.dense(0).shape == (4, 16, 16)


def test_a_torn_line_is_measured_again(made_up, options) -> None:
    made_up.stop = 5, KeyboardInterrupt()
    search = tune(options())
    text = search.options.records.read_bytes()
    search.options.records.write_bytes(text[:-20])
    made_up.stop = 0, KeyboardInterrupt()
    notes: list[str] = []
    assert len(tune(options(), on_note=notes.append).snr) == 4
    assert any("incomplete" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("seconds", -1.0, "seconds: expected times above 0, got -1.0"),
        ("seconds", None, "not a tune record"),
        ("snr", "x", "not a tune record"),
    ],
)
def test_a_record_with_a_strange_value_is_named(made_up, options, name: str, value, wrong: str) -> None:
    made_up.stop = 1, KeyboardInterrupt()
    records = tune(options()).options.records
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    lines[-1]["values"][name] = value
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match=f"line {len(lines)}: {wrong}"):
        tune(options())


def test_what_was_timed_for_the_rule_holds_in_later_runs(made_up, options, monkeypatch) -> None:
    made_up.stop = 1, KeyboardInterrupt()
    first = tune(options())
    monkeypatch.setattr("tokenmerge.default_method.fewest_tokens", lambda *_: pays_from(10**9))
    made_up.stop = None
    assert tune(options()).rule == first.rule
    records = [json.loads(line) for line in first.options.records.read_text().splitlines()]
    facts = {"fewest_tokens": [["block", 0.0, 4], ["layers", 0.0, 4]]}
    assert [one["values"] for one in records if one["about"] == "facts"] == [facts]


@pytest.mark.parametrize(
    ("found", "fewest"),
    [
        (4, pays_from(4)),  # of a search before December 2026
        ([["layers", 0.2, 900], ["layers", 0.5, 4]], (("layers", 0.2, 900), ("layers", 0.5, 4))),
    ],
)
def test_what_was_timed_is_read_from_the_record(made_up, options, found, fewest) -> None:
    made_up.stop = 1, KeyboardInterrupt()
    first = tune(options())
    records = [json.loads(line) for line in first.options.records.read_text().splitlines()]
    for one in records:
        if one["about"] == "facts":
            one["values"] = {"fewest_tokens": found}
    first.options.records.write_text("".join(json.dumps(one) + "\n" for one in records))
    assert tune(options()).facts.fewest_tokens == fewest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speedup": 1.0}, "speedup: expected a number above 1, the speed of dense, such as 2, got 1"),
        ({"speedup": float("nan")}, "speedup: expected a number above 1"),
        ({"metric": "fid"}, "metric: expected one of 'psnr'"),
        ({"out": "tuned.txt"}, "out: expected a file ending in .json, got tuned.txt"),
        ({"within": 0.0}, "within: expected a duration above 0 seconds, got 0"),
        ({"items": 3}, "items: expected an integer ≥ 4, got 3"),
        ({"steps": 1}, "steps: expected at least 2, got 1"),
        ({"prompts": None}, "prompts: only bundled models"),
        ({"size": (8, 8)}, "SSIM needs at least 11 pixels"),
    ],
)
def test_options_out_of_range_are_refused(options, changes, words) -> None:
    if "out" in changes:
        changes = {"out": Path(changes["out"])}
    with pytest.raises(ConfigError, match=words):
        tune(options(**changes))


def test_a_generation_that_cannot_be_faster_is_refused(made_up, options, monkeypatch) -> None:
    monkeypatch.setattr("tokenmerge.default_method.fewest_tokens", lambda *_: pays_from(10**9))
    with pytest.raises(ConfigError, match="size: no plan merges tokens or reuses steps"):
        tune(options(steps=2))


def test_the_rule_of_a_search_is_the_default_method_s(finished, pipe, monkeypatch) -> None:
    monkeypatch.setattr("tokenmerge.default_method.fewest_tokens", lambda *_: pays_from(4))
    rule = settings_for(pipe, 1.5, steps=20, guidance=7.5)
    assert SearchedPlan.of(rule, 20) == finished.rule
