from __future__ import annotations

import dataclasses
import json
from collections import Counter
from types import SimpleNamespace

import pytest
import tiny_pipeline
import torch

from tokenmerge import apply_token_merging
from tokenmerge.config import (
    FoundFor,
    PlanSharing,
    ToMeConfig,
    load_config,
    load_settings,
    save_config,
)
from tokenmerge.errors import ConfigError, NothingToMergeError
from tokenmerge_tools.drawing import Studio
from tokenmerge_tools.reporting import plots
from tokenmerge_tools.tune import result, runner
from tokenmerge_tools.tune.candidates import candidates, what_it_does
from tokenmerge_tools.tune.goal import Goal
from tokenmerge_tools.tune.measurements import estimates
from tokenmerge_tools.tune.result import python_lines, tuned_table, write_result
from tokenmerge_tools.tune.rounds import Outcome, Rounds
from tokenmerge_tools.tune.runner import tune
from tokenmerge_tools.variants.variant import parse_variant


def test_a_search_measures_settings_of_every_kind_and_baselines(finished) -> None:
    search = finished
    families = {search.candidates[look.name].entry.family for look in search.looks}
    assert {"auto", "step reuse", "fewer-steps", "deepcache", "sito", "keys"} <= families
    assert search.complete
    assert search.decision.reached
    assert search.decision.sure
    assert not search.candidates[search.decision.name].entry.rival
    found = estimates(search.looks)
    assert found[search.decision.name].looks == 8
    # fewer-steps has no settings to save.
    assert set(search.configs) < set(search.candidates)


@pytest.mark.slow
def test_a_search_that_was_killed_continues_without_losing_a_look(made_up, options, tmp_path) -> None:
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
        assert {(look.name, look.item) for look in continued.looks} == set(made_up.drawn)
        assert continued.decision.name == whole.decision.name
        assert continued.configs == whole.configs


def test_ctrl_c_keeps_and_reports_what_it_has(made_up, options) -> None:
    made_up.stop = 12, KeyboardInterrupt()
    search = tune(options())
    assert not search.complete
    assert len(search.looks) == 12
    assert search.decision is not None
    write_result(search)
    written = json.loads(search.options.out.read_text())
    assert written["tuned"]["complete"] is False
    made_up.stop = 0, KeyboardInterrupt()
    assert len(tune(options()).looks) == 12  # the finished pictures of the earlier run


def test_a_finished_search_only_reads_its_records(made_up, options) -> None:
    first = tune(options())
    made_up.drawn.clear()
    assert tune(options()).decision == first.decision
    assert made_up.drawn == []


def test_another_goal_uses_the_same_pictures(made_up, options) -> None:
    tune(options())
    before = set(made_up.drawn)
    made_up.drawn.clear()
    tune(options(goal=Goal("psnr", value=45.0)))
    assert not set(made_up.drawn) & before


def test_a_setting_that_cannot_run_is_noted_and_left_out(made_up, options) -> None:
    made_up.failing = ("auto speedup=4", "deepcache interval=5")
    notes: list[str] = []
    search = tune(options(), on_note=notes.append)
    assert not {look.name for look in search.looks} & set(made_up.failing)
    assert {note for note in notes if "cannot run here" in note} == {
        f"{name} cannot run here: it is made to fail" for name in made_up.failing
    }


def test_a_run_without_time_measures_a_setting_that_can_be_the_result(made_up, options) -> None:
    search = tune(options(within=1e-9))
    made_up.failing = tuple(look.name for look in search.looks)
    again = tune(options(within=1e-9, out=search.options.out.with_name("again.json")))
    for one in (search, again):
        assert one.complete
        assert one.decision.name in one.configs


def test_a_goal_that_nothing_reaches_has_a_nearest_setting(made_up, options) -> None:
    search = tune(options(goal=Goal("psnr", speedup=50.0)))
    assert not search.decision.reached
    found = estimates(search.looks)
    best = max(found[look.name].speedup for look in search.looks if look.name in search.configs)
    assert found[search.decision.name].speedup == best
    write_result(search)
    assert json.loads(search.options.out.read_text())["tuned"]["reached"] is False
    assert "nearest to the goal" in [row.cells[1] for row in tuned_table(search).rows]


def test_the_file_has_the_result_what_it_was_found_for_and_its_errors(finished) -> None:
    search = finished
    lines = write_result(search)
    out = search.options.out
    assert load_config(out) == search.configs[search.decision.name]
    found_for = load_settings(out).found_for
    assert (found_for.model, found_for.height, found_for.width, found_for.steps) == (
        "UNet2DConditionModel",
        16,
        16,
        20,
    )
    tuned = json.loads(out.read_text())["tuned"]
    assert tuned["setting"] == search.decision.name
    assert tuned["conditions"]["scheduler"] == "DDIMScheduler"
    assert tuned["conditions"]["versions"]["tokenmerge"]
    chosen = tuned["measured"][0]
    assert (chosen["setting"], chosen["pictures"]) == (search.decision.name, 8)
    assert chosen["psnr_error"] > 0
    assert chosen["speedup_error"] >= 0
    assert {"dense", "settings:"} <= {word.strip(",") for line in lines for word in line.split()}
    for name in ("tuned.svg", "tuned-worst.png", "tuned.jsonl"):
        assert (out.parent / name).stat().st_size > 0
    assert python_lines(search) == f"tokenmerge.apply_token_merging(pipe, {str(out)!r})"


def test_settings_that_merge_only_at_the_size_that_they_were_found_for_are_applied(pipe, tmp_path) -> None:
    latent = pipe.unet.config.sample_size
    config = ToMeConfig(ratio=0.5, min_tokens=latent**2 + 1)
    with pytest.raises(NothingToMergeError, match="larger image"):
        apply_token_merging(pipe, config)
    file = tmp_path / "tuned.json"
    save_config(config, file)
    found_for = FoundFor("UNet2DConditionModel", 2 * latent, 2 * latent, 20)
    tuned = {**json.loads(file.read_text()), "tuned": {"found_for": dataclasses.asdict(found_for)}}
    file.write_text(json.dumps(tuned))
    patch = apply_token_merging(pipe, str(file))
    side = 2 * tiny_pipeline.SIDE
    pipe("a red apple", side, side, num_inference_steps=20)
    assert patch.report().flops_merged < patch.report().flops_dense
    with pytest.raises(NothingToMergeError, match="larger image"):
        pipe("a red apple", num_inference_steps=20)
    patch.remove()


def test_a_variant_that_merges_only_at_a_larger_size_than_the_model_s_own_can_be_drawn(pipe) -> None:
    config = ToMeConfig(ratio=0.5, min_tokens=pipe.unet.config.sample_size**2 + 1)
    (spec,) = parse_variant(f"tome:min_tokens={config.min_tokens}", (0.5,), {})
    side = 2 * tiny_pipeline.SIDE

    def draw(drawing) -> torch.Tensor:
        seed = torch.Generator().manual_seed(0)
        options = {"num_inference_steps": 1, "generator": seed, "output_type": "latent"}
        return drawing("a red apple", side, side, **options).images

    dense = draw(pipe)
    with Studio(pipe) as studio:
        studio.add("merged", lambda copied: spec.apply(copied, config))
        assert not torch.equal(draw(studio.pipes["merged"]), dense)


def test_without_matplotlib_the_rest_is_written(finished, monkeypatch) -> None:
    search = finished

    def missing(chart: object) -> str:
        raise plots.MissingExtraError("tokenmerge-tools[plots]", needed_by="plots")

    monkeypatch.setattr(result, "draw", missing)
    assert any(line.startswith("no chart: plots, which is not installed") for line in write_result(search))
    assert search.options.out.exists()


def test_the_table_shows_the_best_and_always_fewer_steps_caches_and_auto(finished) -> None:
    search = finished
    table = tuned_table(search)
    names = [row.cells[0] for row in table.rows]
    assert names[0] == search.decision.name
    assert table.rows[0].cells[1] == "chosen"
    shown = {search.candidates[name].entry.group for name in names}
    assert {"auto", "fewer-steps", "deepcache"} <= shown


def test_a_real_studio_draws_times_and_measures(options) -> None:
    search = tune(options(within=1e-9, steps=4, items=2))  # the first look is always made
    (look,) = search.looks
    assert look.seconds > 0
    assert look.dense_seconds > 0
    assert 0 < look.closeness <= 100


def test_a_real_studio_is_unchanged_by_what_it_draws(options, monkeypatch) -> None:
    studios: list[Rounds] = []
    begin = Rounds.__init__

    def remember(self, *arguments, **named) -> None:
        begin(self, *arguments, **named)
        studios.append(self)

    monkeypatch.setattr(Rounds, "__init__", remember)
    search = tune(options(within=1e-9, steps=4, items=2))
    (studio,) = studios
    types = [type(module) for module in studio.denoiser.modules()]
    (few,) = [c for c in search.candidates.values() if c.name == "fewer-steps steps=1"]
    tome = next(c for c in search.candidates.values() if c.name.startswith("tome ratio=0.5"))
    found = list(studio.draw(1, [tome, few], {tome.name: search.configs[tome.name], few.name: None}))
    assert [type(one) for one in found] == [Outcome, Outcome]
    assert [one.name for one in found] == [tome.name, few.name]
    assert [type(module) for module in studio.denoiser.modules()] == types
    # Merging and fewer steps change the picture. Equal pictures would have 100 dB.
    assert all(one.metrics["psnr"] < 100 for one in found)


def test_a_picture_that_equals_dense_has_a_finite_psnr(options) -> None:
    search = tune(options(within=1e-9, steps=4, items=2))
    assert all(look.closeness <= 100.0 for look in search.looks)


def test_a_torn_line_is_measured_again(made_up, options) -> None:
    made_up.stop = 5, KeyboardInterrupt()
    search = tune(options())
    text = search.options.records.read_bytes()
    search.options.records.write_bytes(text[:-20])
    made_up.stop = 0, KeyboardInterrupt()
    notes: list[str] = []
    assert len(tune(options(), on_note=notes.append).looks) == 4
    assert any("incomplete" in note for note in notes)


def test_a_bad_record_is_named(made_up, options) -> None:
    made_up.stop = 2, KeyboardInterrupt()
    records = tune(options()).options.records
    records.write_text(records.read_text().replace('"seconds": ', '"seconds": -'))
    with pytest.raises(ConfigError, match=r"line \d+: seconds: expected times above 0, got -"):
        tune(options())


@pytest.mark.parametrize(
    ("name", "value"),
    [("cost", None), ("cost", "NaN"), ("dense_seconds", "NaN"), ("metrics", 3), ("metrics", {"psnr": "x"})],
)
def test_a_record_with_a_strange_value_is_named(made_up, options, name: str, value: object) -> None:
    made_up.stop = 1, KeyboardInterrupt()
    records = tune(options()).options.records
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    lines[-1]["values"][name] = value
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    wrong = "not a tune record|seconds: expected times above 0, got nan"
    with pytest.raises(ConfigError, match=f"line {len(lines)}: ({wrong})"):
        tune(options())


def test_counting_is_left_out_where_it_takes_longer_than_it_saves(finished) -> None:
    lines = [json.loads(line) for line in finished.options.records.read_text().splitlines()]
    assert not [line for line in lines if line["about"] == "counted"]


def test_counted_operations_are_recorded_and_decide_what_is_skipped(made_up, options, monkeypatch) -> None:
    def count(model, config, height, width, batch, steps):
        assert (height, width, batch) == (16, 16, 2)
        assert steps == (20 if config.follows_steps else 1)
        mean = 50 if config.follows_steps else None
        return SimpleNamespace(flops_dense=200, flops_merged=199, flops_mean=mean)

    monkeypatch.setattr(runner, "_WORTH_COUNTING", 1e9)
    monkeypatch.setattr(runner, "predict", count)
    search = tune(options(items=2))
    lines = [json.loads(line) for line in search.options.records.read_text().splitlines()]
    counted = {line["name"]: line["values"]["speedup"] for line in lines if line["about"] == "counted"}
    assert set(counted.values()) == {4.0, 200 / 199}
    looked = {look.name for look in search.looks}
    # A count of 200 / 199 is too small for a speed-up of 1.5, also times the slack of 1.25.
    assert not {name for name, speedup in counted.items() if speedup < 1.2} & looked
    assert {name for name, speedup in counted.items() if speedup == 4.0} & looked


@pytest.mark.parametrize("steps", [2, 4, 8, 20, 50])
@pytest.mark.parametrize("goal", [Goal("psnr", speedup=1.5), Goal("psnr", value=35.0)])
def test_candidates_have_names_of_their_own_and_come_strong_first(goal: Goal, steps: int) -> None:
    found = candidates(goal, steps)
    names = [one.name for one in found]
    assert len(set(names)) == len(names)
    for family in {one.entry.family for one in found}:
        own = [one.entry.strength for one in found if one.entry.family == family]
        assert own == sorted(own, reverse=True)
    few = [one.variant.steps(0) for one in found if one.entry.family == "fewer-steps"]
    assert all(1 <= number < steps for number in few)
    assert few


def test_residuals_of_the_model_are_tried_with_one_plan_for_all_blocks() -> None:
    found = candidates(Goal("psnr", speedup=1.5), 20)
    configs = [one.variant.config() for one in found if one.entry.family == "residuals of the model"]
    wanted = {"features": "model_residual", "proportional": True, "max_downsample": 8}
    assert configs == [
        ToMeConfig(ratio=ratio, plans=PlanSharing(blocks=True), **wanted) for ratio in (0.5, 0.25)
    ]


def test_settings_that_act_alike_are_tried_once() -> None:
    spec = {one.name: one.variant for one in candidates(Goal("psnr", speedup=1.5), 20)}
    five = spec["tome ratio=0 max_downsample=8 reuse.every=5"].config()
    four = spec["tome ratio=0 max_downsample=8 reuse.every=4"].config()
    assert what_it_does(five, 20, merges=False) != what_it_does(four, 20, merges=False)
    assert what_it_does(five, 4, merges=False) == what_it_does(
        four, 4, merges=False
    )  # in 4 steps, every=5 is every=4


def test_of_settings_that_act_alike_one_is_in_the_search(made_up, options) -> None:
    names = set(tune(options(steps=4, items=2)).configs)
    alike = {f"tome ratio=0 max_downsample=8 reuse.every={every}" for every in (5, 4)}
    assert len(alike & names) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out": "tuned.txt"}, "out: expected a file ending in .json, got tuned.txt"),
        ({"within": 0.0}, "within: expected a duration above 0 seconds, got 0"),
        ({"items": 1}, "items: expected an integer ≥ 2, got 1"),
        ({"steps": 1}, "steps: expected at least 2, got 1"),
        ({"prompts": None}, "prompts: only bundled models"),
        ({"size": (8, 8)}, "SSIM needs at least 11 pixels"),
    ],
)
def test_options_out_of_range_are_refused(options, changes, words) -> None:
    from pathlib import Path

    if "out" in changes:
        changes = {"out": Path(changes["out"])}
    with pytest.raises(ConfigError, match=words):
        tune(options(**changes))
