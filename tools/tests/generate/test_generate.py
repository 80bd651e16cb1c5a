from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_pipeline
import torch
from PIL import Image

import tokenmerge
import tokenmerge_tools.generate.run
from tokenmerge.config import ToMeConfig, read_metadata
from tokenmerge.default_method import settings_for
from tokenmerge.errors import ConfigError, NothingToMergeError
from tokenmerge.origin import installable
from tokenmerge.plans import Estimate
from tokenmerge_tools.cli.terminal import result_lines
from tokenmerge_tools.closeness import psnr
from tokenmerge_tools.generate.run import Result, generate
from tokenmerge_tools.method_spec import MethodSpec
from tokenmerge_tools.pipelines.call import PipelineCall
from tokenmerge_tools.pipelines.loading import find_model, guidance_in_force, guides, load_pipeline, twin
from tokenmerge_tools.pipelines.options import GenerateOptions
from tokenmerge_tools.sheets import as_tensor

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Use one thread: for a model this small, more threads are slower, especially beside other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pipe(folder):
    pipe = load_pipeline(find_model(str(folder)), torch.float32, CPU)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def options(folder, out, **changes):
    defaults = {"prompt": "a red apple", "model": str(folder), "steps": 2, "repeat": 1, "out": out}
    defaults["merging"] = MethodSpec("tome")
    return GenerateOptions(**{**defaults, **changes})


def pixels(path):
    return np.asarray(Image.open(path))


# --- what is written ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """One run that several tests share."""
    out = tmp_path_factory.mktemp("results") / "new" / "folder"
    steps = []
    result = generate(options(folder, out, batch=2, repeat=2), steps.append)
    return result, out, steps


def test_every_file_is_there_and_nothing_else(run):
    _, out, _ = run
    assert sorted(path.name for path in out.iterdir()) == [
        "comparison.png",
        "dense-00.png",
        "dense-01.png",
        "run.json",
        "tokenmerge-00.png",
        "tokenmerge-01.png",
    ]


def test_pictures_have_the_model_s_own_size_and_differ_by_merging_and_seed(run):
    _, out, _ = run
    dense, other = pixels(out / "dense-00.png"), pixels(out / "dense-01.png")
    assert dense.shape == (tiny_pipeline.SIDE, tiny_pipeline.SIDE, 3)
    assert not np.array_equal(dense, other)
    assert not np.array_equal(dense, pixels(out / "tokenmerge-00.png"))


def test_the_record_holds_conditions_times_and_quality(run):
    result, out, _ = run
    record = json.loads((out / "run.json").read_text())
    assert record == json.loads(json.dumps(result.to_dict()))
    assert record["complete"] is True
    conditions = record["conditions"]
    assert conditions["seeds"] == [0, 1]
    assert conditions["options"]["merging"] == {"method": "tome"}
    assert conditions["config"] == ToMeConfig().to_dict()
    assert conditions["environment"]["versions"]["torch"] == torch.__version__
    assert (conditions["device"], conditions["dtype"]) == ("cpu", "float32")
    for name in ("dense", "tokenmerge"):
        variant = record["variants"][name]
        assert len(variant["seconds_per_call"]) == 2
        median = sum(variant["seconds_per_call"]) / 2 / 2  # of two calls, of two images each
        assert math.isclose(variant["seconds_per_image"]["median"], median)
    assert record["variants"]["dense"]["speedup"] == 1
    assert record["report"]["rows"][0]["merged_tokens"] < record["report"]["rows"][0]["tokens"]


def test_as_many_dense_steps_as_take_the_same_time_stand_beside_them(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Result, "share_of_work", 1 / 1.6)
    merging = MethodSpec("tome", {"reuse.every": 3, "reuse.shallow_every": 3})
    progress = []
    result = generate(options(folder, tmp_path / "all", merging=merging, steps=8), progress.append)
    steps = 5  # 8 / 1.6
    assert [one.done for one in progress if one.part == "fewer steps"] == [1, 2, 3, 4, 5]
    assert {one.total for one in progress if one.part == "fewer steps"} == {steps}
    generate(options(folder, tmp_path / "few", steps=steps))
    few, every = (
        as_tensor([Image.fromarray(pixels(tmp_path / name / "dense-00.png"))]) for name in ("few", "all")
    )
    record = json.loads((tmp_path / "all" / "run.json").read_text())
    fewer = record["quality"]["fewer_steps"]
    expected = {"steps": steps, "psnr_db": pytest.approx(float(psnr(few, every)), abs=0.2)}  # 8 bits
    assert fewer == {**expected, "seconds": result.fewer_seconds}
    assert fewer["seconds"] > 0
    drawn, alone = tmp_path / "all" / "fewer-steps-00.png", tmp_path / "few" / "dense-00.png"
    assert np.array_equal(pixels(drawn), pixels(alone))
    assert f"Steps: {steps}, " in Image.open(drawn).text["parameters"]
    text = result_lines(result, options(folder, tmp_path, merging=merging, steps=8))
    (line,) = [line for line in text if line.startswith(f"  dense, {steps} steps ")]
    assert f"  {result.fewer_psnr:.1f} dB to dense: " in line
    gain = round(result.psnr[0], 1) - round(result.fewer_psnr, 1)
    fewer = f"{steps} dense steps"
    closer = f"with tokenmerge than with {fewer}, " if gain > 0 else f"with {fewer} than with tokenmerge; "
    assert sum(line.startswith(f"  {abs(gain):.1f} dB closer {closer}") for line in text) == 1
    assert f"{8 / steps:.2f}× by operations with {fewer}" in [line.strip() for line in text]
    text = result_lines(
        dataclasses.replace(result, psnr=(34.9,), fewer_psnr=29.7), options(folder, tmp_path, steps=8)
    )
    assert (
        sum("34.9 dB to dense: larger details differ" in line for line in text) == 1
    )  # not rounded up to 35
    assert sum("29.7 dB to dense: many details differ" in line for line in text) == 1
    result = dataclasses.replace(result, psnr=(33.351,), fewer_psnr=27.449)
    text = result_lines(result, options(folder, tmp_path, merging=merging, steps=8))
    assert any(
        line.startswith("  6.0 dB closer with tokenmerge ") for line in text
    )  # 33.4 and 27.4, as printed
    for theirs, psnr_db, said in (
        (1.05, 27.449, "with tokenmerge than with 5 dense steps, which took about as long"),
        (1.7, 27.449, "with tokenmerge than with 5 dense steps, which took 1.7 times as long"),
        (0.5, 39.351, "with 5 dense steps than with tokenmerge; they took 0.5 times as long"),
    ):
        monkeypatch.setattr(Result, "seconds", lambda _, name: [2.0 if name == "dense" else 1.0])
        timed = dataclasses.replace(result, fewer_seconds=theirs, fewer_psnr=psnr_db)
        text = result_lines(timed, options(folder, tmp_path, merging=merging, steps=8))
        assert f"  6.0 dB closer {said}" in text
    once = "Seconds of one run each; --repeat 3 makes them reliable."
    faster = "Faster by the clock than by operations, probably as other programs slowed the first run."
    for slow, said in (
        (1.0, once),
        (
            30.0,
            f"{faster} {once}",
        ),
    ):
        seconds = {"dense": [slow], "tokenmerge": [1.0]}
        monkeypatch.setattr(Result, "seconds", lambda _, name, seconds=seconds: seconds[name])
        assert f"  {said}" in result_lines(
            result, options(folder, tmp_path, merging=merging, steps=8, repeat=1)
        )
    monkeypatch.undo()
    monkeypatch.setattr(Result, "share_of_work", 1 / 1.1)
    assert generate(options(folder, tmp_path / "two")).fewer_psnr is None  # too little was saved for one step
    panels = [pixels(tmp_path / name / "comparison.png").shape[1] for name in ("all", "two")]
    assert panels[0] - panels[1] == 320 + 16  # three columns, and two


def test_the_comparison_is_announced_before_the_last_timed_call(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Result, "share_of_work", 1 / 1.0)  # so that no fewer steps are drawn
    happened = []

    def announce(path):
        assert path.is_file()
        happened.append("comparison")

    generate(
        options(folder, tmp_path, repeat=2),
        lambda progress: happened.append(f"{progress.part} {progress.done}"),
        lambda options: happened.append(options.size),
        announce,
    )
    assert happened[0] == (tiny_pipeline.SIDE, tiny_pipeline.SIDE)
    assert happened.index("with tokenmerge 2") + 1 == happened.index("comparison")
    assert happened.index("comparison") < happened.index("dense 3")


def test_quality_is_that_of_the_pictures_on_disk(run):
    result, out, _ = run
    for index in (0, 1):
        error = (
            pixels(out / f"dense-{index:02d}.png") / 255 - pixels(out / f"tokenmerge-{index:02d}.png") / 255
        )
        psnr = -10 * math.log10((error**2).mean())
        assert math.isclose(result.psnr[index], psnr, rel_tol=1e-4)
        assert 0 < result.ssim[index] < 1


def test_progress_counts_every_step_of_every_call(run):
    _, _, steps = run
    for variant in ("dense", "with tokenmerge"):
        own = [step for step in steps if step.part == variant]
        assert [step.done for step in own] == [1, 2, 3, 4]  # two timed calls of two steps
        assert {step.total for step in own} == {4}


# --- what the images depend on -------------------------------------------------------------------


def test_a_picture_depends_on_its_seed_alone(folder, run, tmp_path):
    _, out, _ = run
    generate(options(folder, tmp_path, seed=1))
    for variant in ("dense", "tokenmerge"):
        alone = pixels(tmp_path / f"{variant}-00.png").astype(int)
        in_batch = pixels(out / f"{variant}-01.png").astype(int)
        assert np.abs(alone - in_batch).max() <= 1  # kernels round differently for another batch size


def test_ratio_zero_gives_the_dense_picture_and_says_so(folder, tmp_path):
    result = generate(options(folder, tmp_path, merging=MethodSpec("tome", {"ratio": 0.0})))
    assert np.array_equal(pixels(tmp_path / "dense-00.png"), pixels(tmp_path / "tokenmerge-00.png"))
    assert result.psnr == (math.inf,)
    assert json.loads((tmp_path / "run.json").read_text())["quality"]["psnr_db"] == ["inf"]


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize("guidance", [None, 3.0])
def test_the_default_method_is_that_of_the_guidance_of_the_run(folder, tmp_path, guidance):
    merging = MethodSpec("auto", {"speedup": 1.3})
    asked = options(
        folder, tmp_path, size=(32, 32), steps=8, compare=False, merging=merging, guidance=guidance
    )
    result = generate(asked)
    pipe = load_pipeline(find_model(str(folder)), torch.float32, torch.device("cpu"))
    latents = [asked.size[side] // pipe.vae_scale_factor for side in (1, 0)]
    wanted = settings_for(pipe, 1.3, *latents, steps=8, guidance=7.5 if guidance is None else guidance)
    assert ToMeConfig.from_dict(result.conditions["config"]) == wanted


def test_a_tolerance_adds_steps_and_the_picture_names_those_that_ran(folder, tmp_path):
    asked = {"size": (32, 32), "steps": 8, "merging": MethodSpec("auto", {"speedup": 1.3})}
    planned = generate(options(folder, tmp_path / "planned", **asked))
    assert planned.psnr[0] < 100
    planned = dataclasses.replace(
        planned, summary=f"  closeness to dense: {Estimate(36.0, 7.0)}", psnr=(38.14,)
    )
    guess = (
        "  Closeness:   no estimate for this model; on small models 36 dB (29 to 43). Measured here: 38.1 dB"
    )
    assert guess in result_lines(planned, options(folder, tmp_path, **asked))
    result = generate(options(folder, tmp_path / "close", min_psnr=100.0, **asked))
    assert result.psnr == (math.inf,)
    written = Image.open(tmp_path / "close" / "tokenmerge-00.png").text["parameters"]
    config = read_metadata(written[written.index("Token merging: ") :])
    assert not config.merges
    assert len(config.reuse.steps_of(8).full) == 8


@pytest.mark.usefixtures("uncounted")
def test_settings_that_follow_the_steps_have_those_of_the_pipeline(folder, tmp_path):
    """The image is the dense one if none of the two steps merges, and differs if one of them does."""
    for until, equal in ((0.2, True), (0.5, False)):
        out = tmp_path / str(until)
        said = (
            pytest.warns(UserWarning, match="nothing merges in any of 2 steps")
            if equal
            else contextlib.nullcontext()
        )
        with said:
            rules = [{"start": until, "ratio": 0}]
            result = generate(options(folder, out, merging=MethodSpec("tome", {"rules": rules})))
        assert result.conditions["config"]["rules"] == [{"start": until, "ratio": 0.0}]
        assert np.array_equal(pixels(out / "dense-00.png"), pixels(out / "tokenmerge-00.png")) == equal


@pytest.mark.usefixtures("uncounted")
def test_a_method_that_chooses_by_the_model_says_what_it_chose(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    changes = {"ratio": 0.25, "planner": "tome", "min_tokens": 64}
    with pytest.raises(ConfigError, match="ratio: the method auto takes a speed-up"):
        MethodSpec("auto", changes)
    merging = MethodSpec("auto", {"speedup": 1.5, "reuse.every": 2, "reuse.shallow_every": 1})
    result = generate(options(folder, tmp_path / "out", compare=False, merging=merging))
    assert result.conditions["config"]["reuse"]["every"] == 2


def test_without_comparison_only_merged_runs(folder, tmp_path):
    result = generate(options(folder, tmp_path, compare=False))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "tokenmerge-00.png"]
    assert result.names == ("tokenmerge",)
    assert result.psnr == ()
    assert result.speedup("tokenmerge") is None


def test_size_steps_scheduler_guidance_and_negative_prompt_reach_the_pipeline(folder, tmp_path, run):
    _, out, _ = run
    changed = options(folder, tmp_path, size=(48, 24), negative_prompt="blue", guidance=3.0, scheduler="ddpm")
    result = generate(changed)
    assert pixels(tmp_path / "dense-00.png").shape == (24, 48, 3)
    assert result.conditions["scheduler"] == "DDPMScheduler"
    assert result.report.rows[0].grid == (12, 24)
    pipe = load_pipeline(find_model(str(folder)), torch.float32, CPU)
    call = PipelineCall.prepare(pipe, changed, (48, 24))
    assert call.arguments["negative_prompt"] == ["blue"]
    assert call.arguments["guidance_scale"] == 3.0
    assert call.guided
    assert not PipelineCall.prepare(pipe, options(folder, out, guidance=1.0), (48, 24)).guided


@pytest.mark.parametrize(
    ("embeds", "default", "scale", "expected"),
    [
        (None, 7.5, None, True),
        (None, 1.0, None, False),
        (None, None, None, False),  # Qwen-Image
        (False, None, 3.0, True),
        (True, 3.5, None, False),  # FLUX.1-dev
        (True, 3.5, 7.0, False),
    ],
)
def test_pipelines_whose_model_takes_the_scale_denoise_once(embeds, default, scale, expected):
    class Pipe:
        transformer = SimpleNamespace(config={} if embeds is None else {"guidance_embeds": embeds})

        def __call__(self, prompt: str, guidance_scale: float | None = default) -> None: ...

    assert guides(Pipe(), scale) == expected


@pytest.mark.parametrize(
    ("scale", "embeds", "hidden", "expected"),
    [
        (None, False, False, 7.5),
        (3.0, False, False, 3.0),
        (0.5, False, False, 1.0),
        (7.0, True, False, 1.0),
        (7.0, False, True, None),
    ],
)
def test_the_guidance_in_force_is_that_which_settings_see(scale, embeds, hidden, expected):
    class Pipe:
        transformer = SimpleNamespace(config={"guidance_embeds": embeds})

        def __call__(self, prompt: str, guidance_scale: float = 7.5) -> None: ...

    if not hidden:
        Pipe.do_classifier_free_guidance = True
    assert guidance_in_force(Pipe(), scale) == expected


def test_a_controlnet_merges_too_and_its_picture_matters(folder, tmp_path):
    controlnet = tiny_pipeline.write_controlnet(tmp_path / "controlnet")
    for name, colour in (("black", 0), ("white", 255)):
        picture = tmp_path / f"{name}.png"
        Image.new("RGB", (50, 20), (colour,) * 3).save(picture)
        with_control = {"control": picture, "controlnet": str(controlnet)}
        result = generate(options(folder, tmp_path / name, steps=1, compare=False, **with_control))
    assert result.conditions["pipeline"] == "StableDiffusionControlNetPipeline"
    assert "ControlNetModel" in result.report.model
    black, white = (pixels(tmp_path / name / "tokenmerge-00.png") for name in ("black", "white"))
    assert black.shape == white.shape == (tiny_pipeline.SIDE, tiny_pipeline.SIDE, 3)
    assert not np.array_equal(black, white)


def test_dense_stays_dense_in_every_call(folder, tmp_path, monkeypatch):
    patched = []
    call = PipelineCall.__call__

    def spy(self, pipe, on_step):
        patched.append(any("_tokenmerge" in module.__dict__ for module in pipe.unet.modules()))
        return call(self, pipe, on_step)

    monkeypatch.setattr(PipelineCall, "__call__", spy)
    generate(options(folder, tmp_path, steps=1, repeat=2))
    assert patched == [False, True, False, True, False, True]


# --- the twin ---------------------------------------------------------------------------------------


def test_a_twin_shares_weights_and_leaves_the_pipeline_as_it_was(pipe):
    unet = pipe.unet
    other = twin(pipe)
    tokenmerge.apply_token_merging(other, ToMeConfig(ratio=0.5))
    assert pipe.unet is unet
    assert other.unet is not unet
    assert other.vae is pipe.vae
    assert {id(weight) for weight in other.unet.parameters()} == {id(weight) for weight in unet.parameters()}
    assert all("_tokenmerge" not in module.__dict__ for module in unet.modules())


# --- when something goes wrong ---------------------------------------------------------------------


def test_an_interrupted_run_keeps_what_it_has(folder, tmp_path):
    def interrupt(progress):
        if (
            progress.part == "with tokenmerge" and progress.done == 4
        ):  # the last step of the second timed call
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(options(folder, tmp_path, repeat=2), interrupt)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["complete"] is False
    assert len(record["variants"]["dense"]["seconds_per_call"]) == 2
    assert len(record["variants"]["tokenmerge"]["seconds_per_call"]) == 1
    assert record["quality"] is not None
    assert (tmp_path / "comparison.png").is_file()
    assert not list(tmp_path.glob(".*"))


def test_dense_pictures_are_written_before_merging_starts(folder, tmp_path):
    def interrupt(progress):
        if progress.part == "with tokenmerge":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(options(folder, tmp_path), interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense-00.png", "run.json"]


def test_without_torchmetrics_the_run_goes_on_and_says_what_to_install(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics.functional.image", None)
    result = generate(options(folder, tmp_path))
    assert result.psnr == ()
    command = f'pip install "{installable("tokenmerge-tools[metrics]")}"'
    (note,) = [note for note in result.notes if note.endswith(command)]
    assert f"  {note}" in result_lines(result, options(folder, tmp_path))
    assert (tmp_path / "comparison.png").is_file()


def test_recorded_steps_are_in_the_result_and_the_record(folder, tmp_path):
    result = generate(options(folder, tmp_path, steps=3, record_steps=True, compare=False))
    assert [row.step_kind for row in result.steps] == ["full"] * 3
    assert all(row.merging_calls for row in result.steps)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["steps"] == result.steps.to_dicts()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "  "}, "prompt: it is empty"),
        ({"steps": 0}, "steps: expected an integer ≥ 1, got 0"),
        ({"batch": 0}, "batch: expected an integer ≥ 1, got 0"),
        ({"repeat": 0}, "repeat: expected an integer ≥ 1, got 0"),
        ({"seed": -1}, "seed: expected an integer ≥ 0, got -1"),
        ({"guidance": math.nan}, "guidance: expected a number ≥ 0, got nan"),
        ({"guidance": -1.0}, "guidance: expected a number ≥ 0, got -1"),
        ({"dtype": "fp8"}, "dtype: expected one of 'auto', 'fp32', 'fp16', 'bf16', got 'fp8'"),
        (
            {"attention": "flush"},
            "attention: expected one of 'sdpa', 'xformers', 'default', .*'flash'.*, got 'flush'",
        ),
        ({"attention": "flash"}, r"attention: cannot use 'flash' \(.*flash-attn.*\); install what it needs"),
        ({"controlnet": "owner/canny"}, "controlnet: it needs control too"),
        ({"control": "edges.png"}, "control: it needs controlnet too"),
        ({"min_psnr": 0.9}, "min-psnr: expected a PSNR in dB from 1 to 100, such as 30, got 0.9"),
        (
            {"min_psnr": 35.0, "merging": MethodSpec("tome")},
            "min-psnr: it works with a speed-up alone, got tome, ratio 0.5",
        ),
        (
            {"min_psnr": 35.0, "merging": MethodSpec("auto", {"reuse.every": 2})},
            "min-psnr: it works with a speed-up alone",
        ),
    ],
)
def test_options_out_of_range_are_refused_at_once(changes, message):
    with pytest.raises(ConfigError, match=message):
        GenerateOptions(**{"prompt": "a red apple", **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": (33, 32)}, r"size: this model needs multiples of 2 pixels, got 33x32; use 32x32"),
        ({"device": "gpu"}, "device: cannot use 'gpu'"),
        ({"device": "cpu", "dtype": "fp16"}, "fp16 is slow and partly unsupported on a CPU"),
        ({"scheduler": "quick"}, "scheduler: 'quick' is unknown"),
        ({"model": "nothing"}, "'nothing' is not a model"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_weights_are_loaded(
    folder, tmp_path, monkeypatch, changes, message
):
    monkeypatch.setattr(
        tokenmerge_tools.generate.run, "load_pipeline_for", lambda *args: pytest.fail("it was loaded")
    )
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=message):
        generate(options(folder, out, **changes))
    assert not out.exists()


TOO_SMALL = MethodSpec("tome", {"min_tokens": 17})  # for 8 × 8 pixels, which are a grid of 4 × 4 tokens


def test_where_nothing_merges_is_refused_before_the_weights_are_loaded(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(
        tokenmerge_tools.generate.run, "load_pipeline_for", lambda *args: pytest.fail("it was loaded")
    )
    with pytest.raises(NothingToMergeError, match="larger image"):
        generate(options(folder, tmp_path / "out", size=(8, 8), merging=TOO_SMALL))
    assert not (tmp_path / "out").exists()


def test_a_control_picture_that_cannot_be_read_is_refused_before_loading(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(
        tokenmerge_tools.generate.run, "load_pipeline_for", lambda *args: pytest.fail("it was loaded")
    )
    with pytest.raises(ConfigError, match=r"control: cannot read .*no\.png .No such file"):
        generate(options(folder, tmp_path, control=tmp_path / "no.png", controlnet="owner/canny"))


def test_an_output_folder_that_cannot_be_written_is_refused_before_loading(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(
        tokenmerge_tools.generate.run, "load_pipeline_for", lambda *args: pytest.fail("it was loaded")
    )
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"out: cannot write to .*file/below \(Not a directory\); choose"):
        generate(options(folder, tmp_path / "file" / "below"))


def test_a_size_at_which_nothing_merges_is_refused_before_running(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(PipelineCall, "__call__", lambda *args: pytest.fail("it was run"))
    controlnet = tiny_pipeline.write_controlnet(tmp_path / "controlnet")
    picture = tmp_path / "control.png"
    Image.new("RGB", (8, 8)).save(picture)
    control = {"control": picture, "controlnet": str(controlnet)}
    with pytest.raises(NothingToMergeError, match="larger image"):
        generate(options(folder, tmp_path, size=(8, 8), merging=TOO_SMALL, **control))


def test_settings_that_merge_only_at_a_larger_size_than_the_model_s_own_run_at_that_size(folder, tmp_path):
    tokens = (tiny_pipeline.SIDE // 2) ** 2  # at its own size
    merging = MethodSpec("tome", {"min_tokens": tokens + 1})
    size = (2 * tiny_pipeline.SIDE, 2 * tiny_pipeline.SIDE)
    result = generate(options(folder, tmp_path, steps=1, merging=merging, size=size))
    assert math.isfinite(result.psnr[0])  # infinite if nothing merged


def test_options_that_the_pipeline_does_not_know_are_refused(pipe, folder, tmp_path):
    class Unguided(type(pipe)):
        def __call__(self, prompt, width, height, num_inference_steps):
            raise AssertionError

    with pytest.raises(ConfigError, match="Unguided does not accept guidance_scale, negative_prompt"):
        PipelineCall.prepare(
            Unguided(**pipe.components, requires_safety_checker=False),
            options(folder, tmp_path, guidance=3.0, negative_prompt="blue"),
            (32, 32),
        )


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (torch.cuda.OutOfMemoryError("…"), "too little memory.*lower --size"),
        (MemoryError(), "too little memory.*lower --size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "too little memory.*lower --size"),
    ],
)
def test_failures_that_a_user_can_act_on_are_one_line(folder, tmp_path, monkeypatch, failure, message):
    def fail(*args):
        raise failure

    monkeypatch.setattr(PipelineCall, "__call__", fail)
    with pytest.raises(ConfigError, match=message):
        generate(options(folder, tmp_path))


def test_other_failures_are_not_hidden(folder, tmp_path, monkeypatch):
    """A bug in merging is not taken for a fault of the model, which draws without merging."""
    call = PipelineCall.__call__

    def fail(self, pipe, on_step):
        if any(hasattr(module, "_tokenmerge") for module in pipe.unet.modules()):
            raise RuntimeError("a bug")
        return call(self, pipe, on_step)

    monkeypatch.setattr(PipelineCall, "__call__", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        generate(options(folder, tmp_path))


def test_the_default_folder_is_new_and_named_after_the_prompt(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "a-red-apple").mkdir(parents=True)
    result = generate(options(folder, None, compare=False, steps=1))
    assert str(result.folder) == "outputs/a-red-apple-2"
    assert (tmp_path / "outputs" / "a-red-apple-2" / "tokenmerge-00.png").is_file()


def test_the_default_method_draws_what_it_draws_in_python(tmp_path):
    """It knows the noise levels too. Those of this schedule end almost without noise, so other steps run."""
    size, steps = 64, 8
    asked = options(
        "emoji-mmdit", tmp_path, size=(size, size), steps=steps, merging=MethodSpec(), compare=False
    )
    result = generate(asked)
    pipe = load_pipeline(find_model("emoji-mmdit"), torch.float32, CPU)
    pipe.set_progress_bar_config(disable=True)
    with tokenmerge.token_merging(pipe, speedup=2.0) as patch:
        call = PipelineCall.prepare(pipe, asked, (size, size))
        (picture,) = call(pipe)
        assert result.config == patch.config
    assert steps - 1 not in result.config.reuse.steps_of(steps).full
    assert np.array_equal(pixels(tmp_path / "tokenmerge-00.png"), np.asarray(picture))
