"""The default method: what a call asks for, which settings each generation gets, and what the handle says."""

from __future__ import annotations

import dataclasses
import re
import warnings
from types import SimpleNamespace
from typing import Any

import hosts
import pytest
import torch
from diffusers import DDIMScheduler
from tests.kernels import backend
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES
from tests.tuned import ERRORS, tuned, tuned_file
from torch import nn

from tokenmerge import (
    ConfigError,
    Correction,
    MergeSharing,
    NothingToMergeError,
    StepReuse,
    ToMeConfig,
    apply_token_merging,
    calibration,
    token_merging,
)
from tokenmerge.config import dense_outside, read_metadata
from tokenmerge.default_method import DefaultMethod, settings_for
from tokenmerge.models.find import find_hosts
from tokenmerge.models.weights import fingerprint
from tokenmerge.planners import PLANNERS
from tokenmerge.plans.choose import plans_of
from tokenmerge.plans.learned import margin_of
from tokenmerge.runtime.patching.patch import state_of


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which merging is faster on every grid."""
    monkeypatch.setattr(calibration, "TOKENS_ON_CPU", 16)


class Pipeline(SimpleNamespace):
    """A pipeline with a guidance scale; unlike a plain namespace, it can be referenced weakly."""

    @property
    def do_classifier_free_guidance(self) -> bool:
        return True


def pipeline(**models: Any) -> Pipeline:
    return Pipeline(**{"scheduler": DDIMScheduler(), "guidance_scale": 7.5, **models})


def run(pipe: Any, steps: int, side: int = 16) -> None:
    pipe.scheduler.set_timesteps(steps)
    for timestep in pipe.scheduler.timesteps:
        hosts.call(pipe.unet, **{**hosts.inputs(2, side, side), "timestep": timestep})
        pipe.scheduler._step_index = None


def test_a_number_alone_is_refused_with_both_lines():
    unet = hosts.unet()
    for number in (0.5, 2, 0):
        with pytest.raises(ConfigError) as caught:
            apply_token_merging(unet, number)  # type: ignore[call-overload]
        assert "apply_token_merging(pipe, speedup=2.0)" in str(caught.value)
        assert "apply_token_merging(pipe, ratio=0.5)" in str(caught.value)
        assert state_of(unet) is None
    with pytest.raises(ConfigError, match="apply_token_merging: expected a ToMeConfig"):
        apply_token_merging(unet, True)  # type: ignore[call-overload]


def test_a_file_of_tune_corrects_the_estimates_of_its_kind_of_generation(fast, tmp_path):
    pipe = pipeline(unet=hosts.unet())
    plain = apply_token_merging(pipe, speedup=1.5)
    run(pipe, 20)
    before = plain.estimate
    weights = fingerprint(pipe.unet)
    file = tuned_file(tmp_path, tuned(1.5, 20, scheduler=type(pipe.scheduler).__name__, weights=weights))
    patch = apply_token_merging(pipe, file)
    assert str(patch).startswith(
        "tokenmerge in UNet2DConditionModel: the default method, speedup=1.5 (tuned.json)"
    )
    run(pipe, 20)
    assert patch.estimate.prompts == 6
    assert patch.estimate.psnr == pytest.approx(before.psnr + 3.0, abs=0.2)  # that at 1.5, by operations
    assert str(patch.estimate).endswith(", measured on this model with 6 prompts")
    assert f"  closeness to dense: {patch.estimate}" in str(patch)
    with pytest.warns(UserWarning, match="tokenmerge tune measured 20 steps, not 12: the estimate is that"):
        run(pipe, 12)
    assert str(patch.estimate).startswith("no estimate for this model; on small models")


def test_other_weights_are_another_model(fast, tmp_path):
    pipe = pipeline(unet=hosts.unet())
    patch = apply_token_merging(pipe, tuned_file(tmp_path, tuned(1.5, 20, weights="another")))
    with pytest.warns(
        UserWarning, match="tokenmerge tune measured a UNet2DConditionModel with other weights"
    ):
        run(pipe, 20)
    assert patch.estimate.prompts == 0


def test_the_speed_of_a_file_can_be_replaced_and_a_tolerance_asked_for(fast, tmp_path):
    pipe = pipeline(unet=hosts.unet())
    file = tuned_file(tmp_path, tuned(1.5, 20))
    patch = apply_token_merging(pipe, file, speedup=2.0, min_psnr=20)
    assert "speedup=2, min_psnr=20 (tuned.json)" in str(patch).splitlines()[0]
    run(pipe, 20)
    # The margin follows from the spread: 1.40 for 9 of 10 with 8 degrees of freedom, times √(1 + 1/6).
    aim = 20 + 3.0 * 1.397 * (7 / 6) ** 0.5
    assert f"min_psnr 20: the fastest plan whose estimate before a run is at least {aim:.3g} dB" in str(patch)
    with pytest.raises(ConfigError, match="config, ratio: expected one of them"):
        apply_token_merging(pipe, file, ratio=0.5)


@pytest.mark.parametrize("min_psnr", [28, 32, 36])
def test_a_tolerance_takes_the_fastest_whole_plan_where_the_model_was_measured(fast, tmp_path, min_psnr):
    pipe = pipeline(unet=hosts.unet())
    apply_token_merging(pipe, tuned_file(tmp_path, tuned(1.5, 20)), speedup=3.0, min_psnr=min_psnr)
    state = state_of(pipe.unet)
    run(pipe, 20)
    method, facts = state.default, state.default.facts
    plan = method.plan(facts)
    assert state.last_run.config == method.change(plan.config)  # nothing changed while the image was drawn
    aim = min_psnr + margin_of(ERRORS)
    faster = [one for one in plans_of(facts) if plan.speedup < one.speedup <= 3.0]
    assert faster
    assert method.expected(facts).psnr >= aim
    assert all(method.expected(facts, one).psnr < aim for one in faster)


@pytest.mark.parametrize("speedup", [0.9, True, "2", float("nan"), float("inf"), torch.ones(2)])
def test_a_speedup_is_a_number_of_at_least_1(speedup):
    with pytest.raises(ConfigError, match="speedup: expected a number ≥ 1"):
        apply_token_merging(hosts.unet(), speedup=speedup)


@pytest.mark.parametrize(
    "given",
    [{"speedup": 2, "ratio": 0.5}, {"config": ToMeConfig(), "speedup": 2}, {"config": "toma", "speedup": 2}],
)
def test_one_thing_is_asked_for(given):
    with pytest.raises(
        ConfigError, match=f"^{', '.join(given)}: expected one of them, got {next(iter(given))}="
    ):
        apply_token_merging(hosts.unet(), **given)


def test_a_ratio_merges_that_share_of_the_tokens_and_does_nothing_else(fast):
    pipe = pipeline(unet=hosts.unet())
    patch = apply_token_merging(pipe, ratio=0.5)
    assert patch.config == ToMeConfig(
        ratio=0.5, planner="tiled", proportional=True, merge_sharing=MergeSharing(blocks=True)
    )
    assert not patch.config.follows_steps
    assert all(row.merged_tokens == row.tokens // 2 for row in patch.report().rows)
    with token_merging(pipe, ratio=0.25) as inner:
        assert inner.config.ratio == 0.25
    assert state_of(pipe.unet).config.ratio == 0.5
    with pytest.raises(ConfigError, match="ratio: expected 0 ≤ ratio"):
        apply_token_merging(pipe, ratio=0.9)


def test_each_generation_gets_the_settings_for_its_steps_and_guidance(fast):
    pipe = pipeline(unet=hosts.unet())
    patch = apply_token_merging(pipe, speedup=2.0)
    for steps, guidance in ((20, 7.5), (20, 1.0), (6, 7.5)):
        pipe.guidance_scale = guidance
        run(pipe, steps)
        wanted = settings_for(pipe, 2.0, 16, 16, steps=steps, guidance=guidance)
        assert patch.config == wanted
        assert patch.report().steps == steps
        assert read_metadata(patch.metadata()) == wanted


def test_no_argument_is_a_speedup_of_2(fast):
    pipe = pipeline(unet=hosts.unet())
    patch = apply_token_merging(pipe)
    assert str(patch).startswith("tokenmerge in UNet2DConditionModel: the default method, speedup=2\n")
    assert patch.config == settings_for(pipe, 2.0)


def test_a_picture_that_is_expected_far_from_dense_is_told(fast):
    pipe = pipeline(unet=hosts.unet())
    patch = apply_token_merging(pipe, speedup=2.5)
    small = "no estimate for this model; on small models"
    told = f"speedup=2.5: closeness to dense before the run: {small} below 10 dB; take a lower speed-up"
    with pytest.warns(UserWarning, match=told):
        run(pipe, 7)
    assert "warning" not in str(patch)  # the estimate of the run takes its place
    assert "\n  closeness to dense: " in str(patch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(pipe, 50)
        assert "warning" not in str(patch)
        told = rf"{small} 24 dB \(12 to 36\); take a lower"  # below 25 dB
        with pytest.raises(UserWarning, match=told):
            run(pipe, 12)
        apply_token_merging(pipe, speedup=2.5, min_psnr=10)  # the tolerance decides
        run(pipe, 7)


def test_before_a_run_the_report_says_how_close_the_picture_probably_is(fast):
    pipe = pipeline(unet=hosts.unet())
    expected = [
        int(
            re.search(r"\ncloseness to dense, before a run.* on small models (\d+) dB ", str(patch.report()))[
                1
            ]
        )
        for patch in (apply_token_merging(pipe, speedup=speedup) for speedup in (1.5, 3.0))
    ]
    assert 50 > expected[0] > expected[1] > 10
    before = str(apply_token_merging(pipe, speedup=1.5))  # that of another size misleads
    assert "\n  closeness to dense" not in before
    run(pipe, 12)
    assert "\n  closeness to dense" not in str(apply_token_merging(pipe, speedup=3.0, min_psnr=40))


def test_after_a_run_the_handle_tells_of_that_run(fast):
    pipe = pipeline(unet=hosts.unet())
    patch = apply_token_merging(pipe, speedup=30.0)
    with pytest.warns(UserWarning, match="speedup=30: .* 2 steps"):
        run(pipe, 2)
    assert re.search(r"\n  warning: speedup=30: .* in 2 steps", str(patch))  # and not of the default 50
    assert "\n  plan: every step is full: it runs the whole model\n" in str(patch)
    patch = apply_token_merging(pipe, speedup=30.0)
    assert re.search(r"\n  warning: speedup=30: .*Closeness to dense before the run: ", str(patch))
    with pytest.warns(UserWarning, match="Closeness to dense before the run: "):
        run(pipe, 7)
    assert re.search(r"\n  warning: speedup=30: .* speed-up$", str(patch), flags=re.MULTILINE)
    assert "before the run" not in str(patch)  # the run has an estimate of its own
    patch = apply_token_merging(pipe, speedup=2.0)
    assert "\ncloseness to dense, before a run: " in str(patch.report())  # at an unknown guidance
    run(pipe, 12)
    assert str(patch.report()).splitlines()[2] == f"closeness to dense, from the last run: {patch.estimate}"
    assert "\ncloseness to dense, before a run, guidance 7.5: " in str(patch.report(steps=30))


def test_a_speed_up_that_is_nearly_reached_is_not_missed(fast):
    pipe = pipeline(unet=hosts.unet())
    method = DefaultMethod.of(pipe, find_hosts(pipe), 30.0)
    facts = dataclasses.replace(method.facts, steps=6)
    (highest,) = map(float, re.findall(r"at most ([\d.]+)×", method.missed(facts)))
    for share, told in ((1.02, True), (1.006, False)):  # 1 % less than was asked for is not worth a word
        near = dataclasses.replace(method, speedup=share * highest)
        assert ("can be reached" in near.missed(facts)) == told


def test_a_ratio_has_no_estimate(fast):
    pipe = pipeline(unet=hosts.unet())
    patch = apply_token_merging(pipe, ToMeConfig(ratio=0.5, reuse=StepReuse(every=2)))
    run(pipe, 12)
    assert patch.estimate is None
    assert "\n  no estimate: only speedup= has one\n" in str(patch)


def test_a_removed_patch_says_so(fast):
    pipe = pipeline(unet=hosts.unet())
    patch = apply_token_merging(pipe)
    patch.remove()
    title, gone = str(patch).splitlines()
    assert title == "tokenmerge in UNet2DConditionModel: the default method, speedup=2"
    assert gone == "  removed: the model is as before"


def test_the_handle_draws_the_plan_as_one_sign_for_each_step(fast):
    pipe = pipeline(unet=hosts.unet())
    reuse = StepReuse(every=3, shallow_every=2)
    patch = apply_token_merging(pipe, ToMeConfig(reuse=reuse, correction=Correction(every=2)))
    run(pipe, 10)
    assert "  plan: CM·s·C·s·M\n" in str(patch)
    for line in (
        "M in 2 full steps: the whole model runs, and tokens merge",
        "C in 2 full steps: the whole model runs, and no token merges; this step corrects what merging loses",
        "s in 2 shallow steps: only the first and last stage",
        "· in 4 skipped steps: no block",
    ):
        assert f"\n        {line}" in str(patch)
    pipe = pipeline(transformer=model_of(FAMILIES["SD3Transformer2DModel"]))
    patch = apply_token_merging(pipe, ToMeConfig(reuse=StepReuse(every=4)))
    (line,) = (line for line in str(patch).splitlines() if line.startswith("  plan: "))
    assert set(line.removeprefix("  plan: ")) == {"M", "·"}


def test_a_model_alone_has_no_steps_to_follow(fast):
    unet = hosts.unet()
    patch = apply_token_merging(unet, speedup=2.0)
    assert not patch.config.follows_steps
    assert torch.isfinite(hosts.call(unet, **hosts.inputs())).all()


def test_a_speedup_of_1_is_dense(fast):
    unet = hosts.unet()
    inputs = hosts.inputs()
    dense = hosts.call(unet, **inputs)
    patch = apply_token_merging(pipeline(unet=unet), speedup=1)
    assert not state_of(unet).config.follows_steps
    assert torch.equal(hosts.call(unet, **inputs), dense)
    assert "no token merges" in str(patch.report())


def test_where_nothing_merges_and_steps_run_less_the_report_says_so(monkeypatch):
    monkeypatch.setattr(calibration, "TOKENS_ON_CPU", 4096)
    family = FAMILIES["SD3Transformer2DModel"]
    patch = apply_token_merging(pipeline(transformer=model_of(family)), speedup=2.0)
    assert not patch.report().rows
    assert patch.report().flops_merged == patch.report().flops_dense
    assert "those of a step" not in str(patch.report())  # it has the mean alone
    rows = r"\none D step .* 0\.0 %\none · step .* [89]\d\.\d %\nmean over 20 steps .* 5\d\.\d %\n"
    assert re.search(rf"\n +GFLOPs +saved{rows}", str(patch.report()))
    assert "correction.every" not in str(patch.report())


@pytest.mark.parametrize(("steps", "dense"), [(1, True), (2, False)])
def test_a_generation_that_is_over_before_anything_merges_says_so(steps, dense):
    unet = hosts.unet()
    patch = apply_token_merging(pipeline(unet=unet), ToMeConfig(ratio=0.5, rules=dense_outside(0, 0.5)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.at_step(0, steps)
        hosts.call(unet, **hosts.inputs())
    told = [
        "this generation is dense: by the rules {'start': 0.5, 'ratio': 0.0, 'reference_ratio': None, "
        "'reuse.every': 1}, nothing merges in any of 1 step; leave more steps between their start and until, "
        "or take more steps"
    ]
    assert [str(warning.message) for warning in caught] == (told if dense else [])


def test_small_pictures_are_an_error_only_if_nothing_is_saved(monkeypatch):
    monkeypatch.setattr(calibration, "TOKENS_ON_CPU", 4096)
    unet = hosts.unet()
    with pytest.raises(NothingToMergeError, match="pass the pipeline, or write"):
        apply_token_merging(unet, speedup=2.0)
    apply_token_merging(pipeline(unet=unet), speedup=2.0)  # steps without blocks save time at any size


def test_settings_that_do_not_reach_the_speed_up_warn():
    with pytest.warns(UserWarning, match=r"speedup=4: at most 1\.\d+× can be reached in 4 steps on 8 × 8"):
        settings_for(pipeline(unet=hosts.unet()), 4.0, 8, 8, steps=4)


def test_blocks_in_which_nothing_merges_compare_no_tokens(monkeypatch):
    monkeypatch.setattr(calibration, "TOKENS_ON_CPU", 4096)
    monkeypatch.setitem(PLANNERS, "tiled", lambda *_: pytest.fail("tokens were compared"))
    unet = hosts.unet()
    patch = apply_token_merging(pipeline(unet=unet), speedup=2.0)
    for index in range(2):
        patch.at_step(index, 20)
        hosts.call(unet, **hosts.inputs())


def test_attention_by_other_kernels_is_not_asked_for_sizes(fast):
    from diffusers.models.attention_processor import AttnProcessor

    unet = hosts.unet()
    unet.set_attn_processor(AttnProcessor())
    assert not settings_for(unet).proportional
    apply_token_merging(unet, speedup=2.0)
    hosts.call(unet, **hosts.inputs())


def test_attention_of_a_model_without_processors_is_looked_at(fast):
    """CompVis repositories have one class that multiplies matrices, and one that calls PyTorch's."""
    model = hosts.LatentDiffusion()
    assert settings_for(model).proportional

    class CrossAttention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("b i j, b j d -> b i d", (x @ x.mT).softmax(-1), x)

    layers = [module for module in model.modules() if type(module).__name__ == "CrossAttention"]
    layers[0].__class__ = CrossAttention
    assert not settings_for(model).proportional


@pytest.mark.parametrize("name", ["native", "flash", "sage"])
def test_backends_that_take_no_mask_have_proportional_attention_too(name, fast):
    family = FAMILIES["FluxTransformer2DModel"]
    model, arguments = model_of(family), family.inputs(1, 8, 8)
    results = {}
    with backend(name):
        assert settings_for(model).proportional
        for proportional in (False, True):
            config = dataclasses.replace(settings_for(model), min_tokens=0, proportional=proportional)
            apply_token_merging(model, config)
            results[proportional] = call(model, arguments)
    assert not torch.allclose(results[True], results[False], rtol=1e-3)


def test_perturbed_attention_guidance_is_not_asked_for_sizes(fast):
    pipe = pipeline(unet=hosts.unet(), pag_applied_layers=["mid"])
    assert not settings_for(pipe).proportional


def test_the_handle_estimates_how_close_the_last_picture_is(fast):
    pipe = pipeline(unet=hosts.unet())
    patch = apply_token_merging(pipe, speedup=1.5)
    assert patch.estimate is None
    assert "\n  closeness to dense" not in str(patch)
    run(pipe, 12)
    assert f"  closeness to dense: {patch.estimate}" in str(patch)
    apply_token_merging(pipe, ToMeConfig(reuse=StepReuse(every=2)))
    run(pipe, 12)
    assert patch.estimate.psnr > 0  # that of its own last run


@pytest.mark.filterwarnings("ignore:min_psnr=.* is dense")
def test_before_a_run_the_handle_says_that_a_tolerance_slows_it_down(fast):
    pipe = pipeline(unet=hosts.unet())
    why, more = (
        "adds full steps until its estimate is",
        "begins slower than speedup=3",
    )
    assert f"\n  min_psnr 40: a run {more}, and {why} 46 dB, to be safe" in str(
        patch := apply_token_merging(pipe, speedup=3.0, min_psnr=40)
    )
    run(pipe, 12)
    assert why not in str(patch)
    assert why not in str(apply_token_merging(pipe, speedup=3.0))
    line = f"\n  min_psnr 1: a run {why} 7 dB, to be safe, which costs speed"
    assert str(apply_token_merging(pipe, speedup=3.0, min_psnr=1)).endswith(line)
    # Slower than asked, but not because of the tolerance.
    assert more not in str(apply_token_merging(pipe, speedup=3.0, min_psnr=1, until=0.5))


def test_a_ratio_of_1_and_more_is_taken_for_a_speed_up_that_was_meant():
    for ratio in (1, 2.0):
        with pytest.raises(
            ConfigError,
            match=f"from 0 to 0.75, got {ratio}; for half of them write ratio=0.5, and for a speed-up",
        ):
            apply_token_merging(hosts.unet(), ratio=ratio)


def test_the_handle_says_what_is_out_of_reach(fast):
    pipe = pipeline(transformer=model_of(FAMILIES["SD3Transformer2DModel"]))
    told = str(apply_token_merging(pipe, speedup=50))
    assert re.search(
        r"speedup=50\n.*\n.*\n  warning: speedup=50: at most \d+\.\d+× can be reached in \d+ steps",
        told,
    )
    assert "warning" not in str(apply_token_merging(pipe, speedup=1.5))


@pytest.mark.parametrize(
    ("fewest", "reason"),
    [(4096, "on 256 tokens it saves too little time"), (16, "step reuse alone changes the image less")],
)
def test_the_handle_says_why_nothing_merges(fewest, reason, monkeypatch):
    monkeypatch.setattr(calibration, "TOKENS_ON_CPU", fewest)
    pipe = pipeline(unet=hosts.unet())
    patch = apply_token_merging(pipe, speedup=1.05)
    run(pipe, 20)
    assert f"  merging: none; {reason}\n" in str(patch)
