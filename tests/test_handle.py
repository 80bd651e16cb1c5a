"""What the handle of a patch says, before and after a run."""

import dataclasses
import re
import threading

import hosts
import pytest
import torch
import vits
from diffusers import StableDiffusionPipeline
from tests.models import unets
from tests.models.test_every_family import model_of
from tests.models.tiny import FAMILIES

from tokenmerge import (
    ConfigError,
    Correction,
    StepReuse,
    ToMeConfig,
    ViTConfig,
    apply_token_merging,
    handle,
)
from tokenmerge.api import merge_in_hosts
from tokenmerge.calibration import TimedMerging
from tokenmerge.config import dense_outside, read_metadata
from tokenmerge.default_method import settings_for
from tokenmerge.plans import Estimate, FewestTokens, pays_from
from tokenmerge.plans.few_steps import MOST
from tokenmerge.plans.generation import StepKind
from tokenmerge.report import predict
from tokenmerge.report.closeness import Closeness

SKIPS = ToMeConfig(ratio=0.5, reuse=StepReuse(every=3))
FULL = len(SKIPS.reuse.steps_of(12).full)


def generate(pipe, steps=12, size=64, **arguments):
    return pipe("a", height=size, width=size, num_inference_steps=steps, output_type="np", **arguments)


def last_run(patch):
    (line,) = [line for line in str(patch).splitlines() if "last run" in line]
    return line


def test_before_a_run_it_counts_the_default_size_and_number_of_steps(pipe):
    patch = apply_token_merging(pipe, SKIPS)
    assert patch.report() == predict(pipe, SKIPS, steps=50)
    assert "50 steps" in str(patch)
    assert "last run" not in str(patch)
    sample, scale = pipe.unet.config.sample_size, pipe.vae_scale_factor
    size = f"{sample * scale} × {sample * scale} px, 50 steps, guidance 7.5"
    first = f"  no run yet; with the pipeline's defaults ({size}):"
    assert str(patch).splitlines()[1] == first
    default = str(apply_token_merging(pipe, speedup=2.0)).splitlines()
    close = r"closeness to dense: no estimate for this model; on small models \d\d dB \(\d\d to \d\d\)"
    gains = rf" 2\.\d\d× by operations, \d\.\d MB cached; {close}"
    assert re.fullmatch(f"{re.escape(first)}{gains}", default[1])
    # Other sizes and steps have other plans.
    assert default[2:] == ["  for your size: print(patch.report(height=…, width=…, steps=…))"]


def test_it_names_the_ratio_that_was_given_and_no_other_number(pipe):
    patch = apply_token_merging(pipe, ratio=0.25)
    assert str(patch).splitlines()[0].endswith(": ratio 0.25, merging alone")
    assert patch.metadata().startswith("Token merging: ratio 0.25, {")


def test_a_report_is_a_table_at_the_prompt_of_python(pipe):
    report = apply_token_merging(pipe, SKIPS).report()
    assert repr(report) == str(report)
    assert "Row(" not in repr(report)


def test_a_warning_about_a_run_stands_at_the_line_that_ran_it(pipe):
    apply_token_merging(pipe, ToMeConfig(ratio=0.5, min_tokens=10**6, reuse=StepReuse(every=3)))
    with pytest.warns(UserWarning, match="this generation is dense: of 2 steps") as caught:
        generate(pipe, steps=2)
    assert caught[0].filename == __file__


def test_a_model_alone_has_no_number_of_steps():
    patch = apply_token_merging(hosts.unet(), SKIPS)
    assert patch.report() == predict(hosts.unet(), SKIPS)
    assert "1 of 3 steps is full" in str(patch)


def test_another_size_and_number_of_steps(pipe):
    patch = apply_token_merging(pipe, SKIPS)
    scale = pipe.vae_scale_factor
    assert scale > 1
    assert patch.report(24 * scale, 40 * scale, steps=8) == predict(pipe, SKIPS, 24, 40, steps=8)
    assert patch.report(24 * scale, 40 * scale, batch=1, steps=8).batch == 1
    with pytest.raises(ConfigError, match="steps: expected an integer ≥ 1 and ≤ 5,000, got 0"):
        patch.report(steps=0)
    with pytest.raises(ConfigError, match=f"height, width: expected multiples of {scale} pixels, got 64, 65"):
        patch.report(64, 65)
    for wrong in (scale - 1, 0, 64.0):
        with pytest.raises(ConfigError, match=f"height, width: expected an integer ≥ {scale}, got {wrong}"):
            patch.report(wrong, 64)


def test_the_plan_of_another_guidance_can_be_shown_before_and_after_a_run(pipe):
    patch = apply_token_merging(pipe, speedup=2.0)
    size = {"height": 64, "width": 64, "steps": 12}
    side = 64 // pipe.vae_scale_factor
    plans = {}
    for guidance in (1.5, 7.5):
        wanted = settings_for(pipe, 2.0, side, side, steps=12, guidance=guidance)
        report = patch.report(**size, guidance=guidance)
        assert report.step_signs == predict(pipe, wanted, side, side, steps=12).step_signs
        said = r"no estimate for this model; on small models \d\d dB \(\d\d to \d\d\)"
        before = rf"\ncloseness to dense, before a run, guidance {guidance:g}: {said}\nplan: "
        assert re.search(before, str(report))
        plans[guidance] = report.step_signs
    assert plans[1.5] != plans[7.5]
    assert patch.report(**size).step_signs == plans[7.5]  # the pipeline's default
    generate(pipe, guidance_scale=1.5)
    assert patch.report().step_signs == plans[1.5]
    assert patch.report(guidance=7.5).step_signs == plans[7.5]
    for wrong in (-1, "strong"):
        with pytest.raises(ConfigError, match=r"guidance: expected a number ≥ 0, such as 7\.5, got"):
            patch.report(guidance=wrong)


def test_a_model_alone_takes_the_size_of_its_latents():
    patch = apply_token_merging(hosts.unet(), SKIPS)
    assert patch.report(24, 40) == predict(hosts.unet(), SKIPS, 24, 40)


@pytest.mark.parametrize("name", ["vae_scale_factor_spatial", "vae_spatial_compression_ratio"])
def test_pipelines_of_videos_tell_the_scale_by_other_names(pipe, name):
    scale = pipe.vae_scale_factor
    del pipe.vae_scale_factor
    setattr(pipe, name, 2 * scale)
    patch = apply_token_merging(pipe, SKIPS)
    assert patch.report(48 * scale, 32 * scale).height == 24


def test_after_a_run_it_counts_that_run(pipe):
    patch = apply_token_merging(pipe, SKIPS)
    generate(pipe, size=64, guidance_scale=1.0)
    side = 64 // pipe.vae_scale_factor
    assert patch.report() == predict(pipe, SKIPS, side, side, batch=1, steps=12)
    assert sum(map(patch.report().step_signs.count, "MDC")) == FULL
    assert last_run(patch).startswith("  last run: 64 × 64 px, 12 steps, no classifier-free guidance, ")
    generate(pipe, steps=4, size=96)
    side = 96 // pipe.vae_scale_factor
    assert patch.report() == predict(pipe, SKIPS, side, side, batch=2, steps=4)
    assert patch.report(steps=8).height == side


def test_steps_are_merged_unmerged_or_reused(pipe):
    """Of 12 steps, the last 6 do not merge, and every second one of the first 6 is a correction."""
    config = ToMeConfig(ratio=0.5, rules=dense_outside(0, 0.5), correction=Correction(every=2))
    patch = apply_token_merging(pipe, config)
    generate(pipe)
    assert patch.report().step_signs == "CMCMCMDDDDDD"
    merging = re.search(r"  merging: (.*)", str(patch))[1]
    # The plan has C.
    assert re.fullmatch(r"\d+ → \d+ tokens in self-attention of \d of \d transformer blocks", merging)
    assert "        M in 3 full steps: the whole model runs, and tokens merge\n" in str(patch)


def test_an_interrupted_run_says_how_far_it_came(pipe):
    patch = apply_token_merging(pipe, SKIPS)

    def stop(pipe: StableDiffusionPipeline, index: int, timestep: int, kept: dict) -> dict:
        if index == 4:
            raise KeyboardInterrupt
        return kept

    with pytest.raises(KeyboardInterrupt):
        generate(pipe, callback_on_step_end=stop)
    assert "5 of 12 steps" in last_run(patch)


def test_settings_that_do_not_follow_the_steps_tell_the_number_of_steps(pipe):
    patch = apply_token_merging(pipe, ToMeConfig(ratio=0.5))
    generate(pipe, steps=3)
    said = r"  last run: 64 × 64 px, 3 steps, guidance 7\.5, \d+\.\d s of denoising"
    assert re.fullmatch(said, last_run(patch))


def test_what_the_default_method_does_at_the_guidance_of_the_run_is_counted(pipe):
    patch = apply_token_merging(pipe, speedup=2.0)
    for scale in (3.0, 7.5):
        generate(pipe, guidance_scale=scale)
        side = 64 // pipe.vae_scale_factor
        assert patch.config == settings_for(pipe, 2.0, side, side, steps=12, guidance=scale)
        assert patch.report().steps == 12


def test_the_seconds_are_those_from_the_first_call_to_the_last(pipe, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("tokenmerge.runtime.memory.run_log.time.perf_counter", lambda: next(clock))
    patch = apply_token_merging(pipe, SKIPS)
    generate(pipe, steps=4)
    assert last_run(patch).endswith(
        ", 4 steps, guidance 7.5, 4.0 s of denoising"
    )  # the clock is read at the start and after each call


def test_the_seconds_of_merging_alone_are_those_of_one_generation(pipe, monkeypatch):
    """Each call has a log of its own there, which reads the clock as it begins."""
    clock = iter(range(100))
    monkeypatch.setattr("tokenmerge.runtime.memory.run_log.time.perf_counter", lambda: next(clock))
    patch = apply_token_merging(pipe, ratio=0.5)
    for _ in range(2):
        generate(pipe, steps=4)
        assert last_run(patch).endswith(", 4 steps, guidance 7.5, 7.0 s of denoising")
    model = hosts.unet()
    alone = apply_token_merging(model, ratio=0.5)
    hosts.call(model, **hosts.inputs())
    assert " s of denoising" not in last_run(alone)  # who calls a model alone is not known


def test_an_unknown_argument_of_the_report_is_refused_with_the_one_that_is_meant(pipe):
    patch = apply_token_merging(pipe, SKIPS)
    for name, meant in (
        ("num_inference_steps", "steps"),
        ("guidance_scale", "guidance"),
        ("hieght", "height"),
    ):
        with pytest.raises(
            TypeError, match=rf"{name}: patch\.report takes .*, got {name}=5; did you mean '{meant}'"
        ):
            patch.report(**{name: 5})
    with pytest.raises(TypeError, match=r"size: patch\.report takes .*references, got size=5$"):
        patch.report(size=5)


@pytest.mark.slow
def test_another_thread_and_another_generation_do_not_mix(pipe):
    patch = apply_token_merging(pipe, SKIPS)
    generate(pipe)
    first = last_run(patch)
    others: list[str] = []

    def run_four_steps() -> None:
        generate(pipe, steps=4)
        others.append(last_run(patch))

    for target in (run_four_steps, lambda: others.append(last_run(patch))):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    # A thread reads its own run, and one without a run that which began last.
    assert all("4 steps" in other for other in others)
    assert len(others) == 2
    assert last_run(patch) == first
    generate(pipe)
    assert last_run(patch).rpartition(",")[0] == first.rpartition(",")[0]


def test_the_cache_of_flux_is_told_before_the_run():
    model = model_of(FAMILIES["FluxTransformer2DModel"]).to(torch.bfloat16)
    patch = apply_token_merging(model, ToMeConfig(reuse=StepReuse(every=2)))
    patch.at_size(8, 8)
    report = patch.report(8, 8)
    assert report.kept_bytes > 0
    assert patch.report(8, 8, batch=2).kept_bytes == 2 * patch.report(8, 8, batch=1).kept_bytes
    assert report.batch == 1  # FLUX knows the scale of guidance, and draws one sample for an image


def test_where_no_size_is_known_it_says_what_to_do():
    model = hosts.unet(sample_size=None)
    patch = apply_token_merging(model, ToMeConfig(ratio=0.5))
    assert "not counted: height, width: UNet2DConditionModel has no default size" in repr(patch)


def test_a_whole_block_and_corrections_without_a_plan_are_told():
    config = ToMeConfig(ratio=0.5, scope="block", correction=Correction(every=3))
    (line,) = [
        one for one in str(apply_token_merging(hosts.unet(), config)).splitlines() if "merging:" in one
    ]
    corrects = "1 of 3 full steps merges nothing and corrects the others"
    assert line == f"  merging: 256 → 128 tokens in 3 of 7 transformer blocks; {corrects}"


def test_html_shows_the_same_text():
    patch = apply_token_merging(hosts.unet(), ToMeConfig(ratio=0.5, rules=[{"level": 2, "ratio": 0.25}]))
    shown = patch._repr_html_()
    assert shown.startswith("<pre>tokenmerge in UNet2DConditionModel")
    assert "&#x27;" in shown
    assert "256 → 128 tokens" in shown


def test_a_vision_transformer():
    patch = apply_token_merging(vits.vit(), ViTConfig(r=1))
    assert "of the operations saved" in repr(patch)
    assert patch.report(batch=3).batch == 3
    with pytest.raises(ConfigError, match="steps: a vision transformer has no steps, got 5"):
        patch.report(steps=5)
    with pytest.raises(ConfigError, match=r"guidance: .* has no guidance, got 7\.5"):
        patch.report(guidance=7.5)
    with pytest.raises(ConfigError, match="estimate: a vision transformer draws no images"):
        print(patch.estimate)


def test_metadata_applies_the_same_settings_again(monkeypatch):
    # Whatever this machine's speed.
    monkeypatch.setattr("tokenmerge.default_method.fewest_tokens", lambda *_: pays_from(16))
    unet = hosts.unet()
    patch = apply_token_merging(unet, speedup=2.0)
    line = patch.metadata()
    assert line.startswith("Token merging: speedup=2, {")
    assert apply_token_merging(hosts.unet(), read_metadata(line)).config == patch.config
    assert apply_token_merging(unet, "toma").metadata().startswith("Token merging: toma 0.5, {")
    assert apply_token_merging(unet, SKIPS).metadata().startswith("Token merging: ratio 0.5, {")
    with pytest.raises(ConfigError, match="metadata: a vision transformer draws no images"):
        apply_token_merging(vits.vit(), ViTConfig(r=1)).metadata()


def test_steps_outside_the_part_that_merges_are_complete(pipe):
    """The text before the run predicts the number of full steps in the run."""
    patch = apply_token_merging(pipe, SKIPS, start=0.25, until=0.75)
    generate(pipe)
    run = len([kind for kind in patch._state.last_run.kind_of_step.values() if kind is StepKind.FULL])
    assert FULL < run < 12
    assert sum(map(patch.report().step_signs.count, "MDC")) == run


@pytest.mark.parametrize("config", [ToMeConfig(ratio=0.5), ToMeConfig(ratio=0.5, scope="keys")], ids=repr)
def test_attention_on_fewer_tokens_than_pay_on_the_device_is_named(config, monkeypatch):
    asked = []

    def timed(merging):
        asked.append(merging)
        return FewestTokens("layers", 0.2, 10**9), FewestTokens("layers", 0.5, 300)

    monkeypatch.setattr("tokenmerge.handle.fewest_tokens", timed)
    patch = apply_token_merging(hosts.unet(), config)
    small, large = patch.report(height=16, width=16), patch.report(height=20, width=20)
    merging = sum(row.tokens == 256 for row in small.rows)
    assert merging > 1
    note = (
        f"{merging} blocks merge attention on 256 tokens, where it saves hardly any time: on this device "
        "it pays from 300 tokens on; min_tokens=300 leaves smaller grids dense"
    )
    assert [one for one in small.notes if "hardly any time" in one] == [note]
    assert not any("hardly any time" in one for one in large.notes)
    assert asked[0] == TimedMerging(torch.device("cpu"), torch.float32, "layers", False, 2, 32, 4, 1)
    assert f"  hardly faster: {note}" in repr(patch).splitlines()
    following = apply_token_merging(hosts.unet(sample_size=20), dataclasses.replace(config, min_tokens=300))
    assert "hardly" not in repr(following)


def test_where_merging_was_faster_on_no_grid_the_note_names_no_number(monkeypatch):
    monkeypatch.setattr("tokenmerge.handle.fewest_tokens", lambda *_: pays_from(256**2))
    patch = apply_token_merging(hosts.unet(), ToMeConfig(ratio=0.5))
    (note,) = (one for one in patch.report(height=16, width=16).notes if "timed" in one)
    assert note.endswith("merged attention was timed on this device, and saved hardly any time on all grids")


@pytest.mark.parametrize(("scope", "size"), [("block", 16), ("layers", 129)])
def test_nothing_is_timed_for_whole_blocks_and_for_large_grids(scope, size, monkeypatch):
    monkeypatch.setattr("tokenmerge.handle.fewest_tokens", lambda *_: pytest.fail("timed"))
    patch = apply_token_merging(hosts.unet(), ToMeConfig(ratio=0.5, scope=scope))
    assert patch.report(height=size, width=size).rows


@pytest.mark.parametrize("size", [pytest.param(None, marks=pytest.mark.slow), 17], ids=["default", "odd"])
def test_a_handle_of_any_unet_can_be_printed_at_any_default_size(size):
    """Counting may fail where the default size does not fit the model; printing says so instead."""
    builds = {name: family.build for name, family in unets.FAMILIES.items()}
    builds |= {host.__name__: host for host in (hosts.sdxl, hosts.controlnet_union, hosts.LatentDiffusion)}
    for build in builds.values():
        model = build()
        if size is not None and "sample_size" in getattr(model, "config", ()):
            model.register_to_config(sample_size=size)
        elif size is not None and isinstance(model, hosts.LatentDiffusion):
            model.model.diffusion_model.image_size = size
        # The size is checked when it is applied; here, only printing is.
        patch = merge_in_hosts(model, ToMeConfig(ratio=0.5, max_downsample=8), check_size=False)
        assert repr(patch).startswith("tokenmerge in ")
        patch.remove()


def test_a_size_that_does_not_fit_the_model_is_a_typed_error():
    model = FAMILIES["UNetControlNetXSModel"].build()
    patch = apply_token_merging(model, ToMeConfig(ratio=0.5, max_downsample=8))
    with pytest.raises(ConfigError, match=r"height, width: .* cannot be counted for a sample of 17 × 17 \("):
        patch.report(17, 17)
    model.register_to_config(sample_size=17)
    assert "not counted: height, width: operations of UNetControlNetXSModel" in str(patch)


@pytest.mark.parametrize("config", [ToMeConfig(ratio=0.5), ViTConfig(r=2)])
def test_an_error_of_another_library_does_not_keep_a_handle_from_being_printed(config, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no such kernel\nand more")

    model = hosts.unet() if isinstance(config, ToMeConfig) else vits.vit()
    patch = apply_token_merging(model, config)
    monkeypatch.setattr(patch, "report", fails)
    assert str(patch).endswith("\n  not counted: no such kernel")


def test_an_error_of_a_pipeline_does_not_keep_a_handle_from_being_printed(pipe, monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("no guider yet\nand more")

    patch = apply_token_merging(pipe, SKIPS)
    monkeypatch.setattr(type(pipe), "guider", property(fails), raising=False)
    shown = str(patch)  # before a run
    assert "\n  guidance: unknown: no guider yet" in shown
    assert "merging: " in shown
    monkeypatch.undo()
    generate(pipe, steps=2)
    monkeypatch.setattr(type(pipe), "do_classifier_free_guidance", property(fails))
    assert str(patch).endswith("\n  not shown: no guider yet")
    assert repr(patch).startswith("tokenmerge in UNet2DConditionModel: ")


def test_a_report_of_no_steps_is_refused(pipe):
    patch = apply_token_merging(pipe, speedup=2.0)
    with pytest.raises(ConfigError, match="steps: expected an integer ≥ 1 and ≤ 5,000, got 0"):
        patch.report(steps=0)
    patch.remove()


def test_in_few_steps_it_names_fewer_steps_and_a_picture_far_from_dense_has_advice(pipe):
    patch = apply_token_merging(pipe, speedup=1.5)
    for steps in (MOST, MOST + 1):
        generate(pipe, steps=steps)
        fewer = round(steps / patch.report().speedup)
        said = f"\n  few steps: {fewer} steps of the unchanged model take as long, and can be as close; "
        assert (said in str(patch)) == (steps == MOST)
    apply_token_merging(pipe, speedup=1.0)
    generate(pipe, steps=8)
    assert "few steps" not in str(patch)  # it is dense
    for speedup, far in ((1.1, False), (8.0, True)):
        patch = apply_token_merging(pipe, speedup=speedup)
        generate(pipe, steps=MOST + 1)
        assert (patch.estimate.psnr < 30) == far
        assert ("\n  for a closer image: a lower speedup, or more steps\n" in str(patch)) == far
    patch.remove()


@pytest.mark.filterwarnings("ignore:min_psnr=.* is dense")
def test_of_a_tolerance_that_no_plan_keeps_no_added_steps_are_told(pipe):
    for level, adds in ((20, True), (100, False)):
        patch = apply_token_merging(pipe, speedup=2.0, min_psnr=level)
        assert re.search(r": at most \d\.\d\d× by operations", str(patch))
        assert ("adds full steps" in str(patch)) == adds
        assert ("adds full steps" in str(patch.report())) == adds


def test_it_expects_up_to_15_percent_less_by_the_clock(pipe):
    patch = apply_token_merging(pipe, speedup=2.0)
    generate(pipe, steps=12)
    low, high = re.search(r"; expect (\S+) to (\S+)× by the clock\)", str(patch)).groups()
    counted = patch.report().speedup
    assert (low, high) == (f"{0.85 * counted:.1f}", f"{counted:.1f}")
    patch = apply_token_merging(pipe, ratio=0.5)
    generate(pipe, steps=3)
    assert "; expect less by the clock)" in str(patch)  # on a GPU it can take longer
    patch.remove()


def test_a_speed_up_out_of_reach_or_far_from_dense_warns_when_it_is_asked_for(pipe):
    told = r"^speedup=40, with the pipeline's defaults: at most \d+\.\d+× can be reached in 50 steps "
    with pytest.warns(UserWarning, match=told) as caught:
        apply_token_merging(pipe, speedup=40)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(
        UserWarning, match="=12, with .* defaults: closeness to dense before the run: .*; take a lower"
    ):
        apply_token_merging(pipe, speedup=12)
    apply_token_merging(pipe, speedup=3)  # silent, as warnings are errors here


def test_a_report_says_what_a_tolerance_costs(pipe):
    patch = apply_token_merging(pipe, speedup=2.0, min_psnr=20)
    before = str(patch.report(height=64, width=64, steps=12))
    assert re.search(r"\ncloseness to dense, before a run, .*\nmin_psnr 20: a run .* is 26 dB", before)
    generate(pipe, steps=12)
    (line,) = (line for line in str(patch).splitlines() if line.startswith("  min_psnr 20: the estimate"))
    assert line.strip() in str(patch.report()).splitlines()
    patch.remove()


@pytest.mark.parametrize(("psnr", "reached"), [(20.0, "above"), (19.9, "below")])
def test_the_handle_says_whether_the_estimate_reaches_the_tolerance(pipe, monkeypatch, psnr, reached):
    patch = apply_token_merging(pipe, speedup=2.0, min_psnr=20)
    generate(pipe, steps=12)
    monkeypatch.setattr(handle, "closeness_of", lambda *_: Closeness(Estimate(psnr, within=7.0)))
    assert f"\n  min_psnr 20: the estimate is {reached} 20 dB; the plan aims at 26 dB" in str(patch)


def test_a_removed_patch_keeps_what_its_last_run_did(pipe):
    patch = apply_token_merging(pipe, speedup=2.0)
    generate(pipe, steps=12)
    before = str(patch).splitlines()
    patch.remove()
    assert [line.split(":")[0] for line in before[1:4]] == [
        "  last run",
        "  counted by operations",
        "  closeness to dense",
    ]
    title, *others = before
    assert str(patch).splitlines() == [title, "  removed: the model is as before", *others]


def test_of_one_step_it_says_one_step(pipe):
    patch = apply_token_merging(pipe, speedup=2.0)
    with pytest.warns(UserWarning, match="at most"):
        generate(pipe, steps=1)
    assert "64 px, 1 step, guidance" in last_run(patch)
    patch.remove()


def test_half_a_size_is_completed_by_the_last_run_or_refused(pipe):
    patch = apply_token_merging(pipe, speedup=2.0)
    with pytest.raises(ConfigError, match="height: give width too"):
        patch.report(height=32)
    generate(pipe, steps=12)
    side = 64 // pipe.vae_scale_factor
    report = patch.report(height=128)
    assert (report.height, report.width) == (2 * side, side)
    patch.remove()


def test_a_speedup_of_1_gives_the_dense_picture(pipe):
    patch = apply_token_merging(pipe, speedup=1.0)
    generate(pipe, steps=3)
    said = r"  last run: 3 steps, guidance 7\.5, \d+\.\d s of denoising"
    assert re.fullmatch(said, last_run(patch))
    assert "  closeness to dense: the dense image itself: nothing was skipped or merged\n" in str(patch)
    patch.remove()


def test_a_patch_that_another_one_replaced_is_not_called_removed(pipe):
    first = apply_token_merging(pipe, speedup=2.0)
    second = apply_token_merging(pipe, speedup=3.0)
    assert str(first).splitlines()[1:] == ["  replaced by a later call"]
    second.remove()
    assert str(second).splitlines()[1:] == ["  removed: the model is as before"]
