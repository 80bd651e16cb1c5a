"""Old scripts keep working: tomesd's and ppdiffusers' calls, and tomesd's results."""

import inspect
import subprocess
import sys
import textwrap
import warnings

import hosts
import numpy as np
import pytest
import tomesd
import torch
from diffusers import StableDiffusionControlNetPipeline
from torch import nn

import tokenmerge
from tokenmerge import (
    ConfigError,
    NothingToMergeError,
    UnsupportedModelError,
    apply_patch,
    remove_patch,
)
from tokenmerge.compat import apply_tome
from tokenmerge.runtime.patching.patch import state_of

SCOPES = {
    "attn": {},
    "everything": {"merge_crossattn": True, "merge_mlp": True},
    "two levels": {"max_downsample": 2},
    "wide cells": {"sx": 4, "sy": 3, "ratio": 0.8},
}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def test_the_signatures_are_those_of_tomesd():
    for name in ("apply_patch", "remove_patch"):
        ours = inspect.signature(getattr(tokenmerge, name)).parameters.values()
        theirs = inspect.signature(getattr(tomesd, name)).parameters.values()
        assert [(p.name, p.default, p.kind) for p in ours] == [(p.name, p.default, p.kind) for p in theirs]


@pytest.mark.parametrize("size", [(32, 32), (24, 36), (17, 13)])
@pytest.mark.parametrize("scope", SCOPES)
def test_without_randomness_the_result_is_that_of_tomesd(size, scope):
    unet = hosts.unet().double()  # so that rounding decides no match of two tokens alike
    inputs = {
        name: value.double() if value.is_floating_point() else value
        for name, value in hosts.inputs(2, *size).items()
    }
    sample, timestep, text = inputs.values()
    dense = hosts.call(unet, **inputs)
    settings = {"ratio": 0.5, "use_rand": False, **SCOPES[scope]}
    assert tomesd.apply_patch(unet, **settings) is unet
    with torch.no_grad():
        theirs = unet(sample, timestep, encoder_hidden_states=text).sample
    tomesd.remove_patch(unet)
    del unet._tome_info  # tomesd leaves it
    assert apply_patch(unet, **settings) is unet
    ours = hosts.call(unet, **inputs)
    assert remove_patch(unet) is unet
    assert relative(ours, theirs) < 1e-5 < 10 * relative(ours, dense)
    assert torch.equal(hosts.call(unet, **inputs), dense)


def test_without_randomness_the_result_on_a_compvis_model_is_that_of_tomesd():
    model = hosts.LatentDiffusion()
    unet = model.model.diffusion_model
    settings = {"ratio": 0.5, "use_rand": False, **SCOPES["everything"]}
    with torch.no_grad():
        dense = unet(*hosts.compvis_inputs())
        tomesd.apply_patch(model, **settings)
        theirs = unet(*hosts.compvis_inputs())
        tomesd.remove_patch(model)
        apply_patch(model, **settings)
        ours = unet(*hosts.compvis_inputs())
    assert relative(ours, theirs) < 1e-5 < relative(ours, dense)


def test_a_ratio_that_is_too_high_is_clipped_as_in_tomesd_and_said():
    unet = hosts.unet()
    sample, timestep, text = hosts.inputs().values()
    tomesd.apply_patch(unet, ratio=0.95, use_rand=False)
    with torch.no_grad():
        theirs = unet(sample, timestep, encoder_hidden_states=text).sample
    tomesd.remove_patch(unet)
    with pytest.warns(UserWarning, match=r"ratio=0\.95 is more than sx=2, sy=2 allow; .* = 0\.75") as caught:
        apply_patch(unet, ratio=0.95, use_rand=False)
    assert caught[0].filename == __file__
    assert relative(hosts.call(unet, **hosts.inputs()), theirs) < 1e-5


def test_the_highest_ratio_is_not_clipped_and_not_warned_about():
    """Three of the four tokens of each cell merge, as in tomesd."""
    unet = hosts.unet()
    sample, timestep, text = hosts.inputs().values()
    tomesd.apply_patch(unet, ratio=0.75, use_rand=False)
    with torch.no_grad():
        theirs = unet(sample, timestep, encoder_hidden_states=text).sample
    tomesd.remove_patch(unet)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_patch(unet, ratio=0.75, use_rand=False)
    assert state_of(unet).config.ratio == 0.75
    assert relative(hosts.call(unet, **hosts.inputs()), theirs) < 1e-5


def test_numbers_of_numpy_and_truth_values_are_taken_as_tomesd_takes_them():
    unet, other = hosts.unet(), hosts.unet()
    apply_patch(unet, np.float32(0.5), np.int64(1), np.int64(2), 2, 1, np.True_, 0, None)
    apply_patch(other)
    assert torch.equal(hosts.call(unet, **hosts.inputs()), hosts.call(other, **hosts.inputs()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"ratio": -0.1},
            r"ratio: expected a number from 0 to 1 − 1/\(sx·sy\), 0.75 for 2 × 2 cells, got -0.1",
        ),
        (
            {"ratio": float("nan")},
            r"ratio: expected a number from 0 to 1 − 1/\(sx·sy\), 0.75 for 2 × 2 cells, got nan",
        ),
        (
            {"ratio": "half"},
            r"ratio: expected a number from 0 to 1 − 1/\(sx·sy\), 0.75 for 2 × 2 cells, got 'half'",
        ),
        ({"sx": 1, "sy": 1}, "= 0 for sx=1, sy=1, got 0.5"),
        ({"sx": 0}, "sx: expected an integer ≥ 1, got 0"),
        ({"max_downsample": 0, "ratio": "half"}, "ratio: expected a number from 0 to .*, got 'half'"),
        ({"max_downsample": float("nan")}, "max_downsample: expected"),
        ({"max_downsample": "1"}, "max_downsample: expected"),
        ({"merge_attn": False}, "nothing would merge; set one"),
    ],
)
def test_bad_values_are_errors_and_nothing_is_patched(settings, message):
    unet = hosts.unet()
    with pytest.raises(ConfigError, match=message):
        apply_patch(unet, **settings)
    assert "_tokenmerge" not in unet.__dict__


class Patcher:
    """Programs keep a model in an object of their own that is not a module."""

    def __init__(self, module: nn.Module) -> None:
        self.model = nn.Module()
        self.model.diffusion_model = module
        self.size = 0


class Quantised(nn.Module):
    """A wrapper of another class around the UNet of a CompVis-style model."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.inner = unet

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("wrap", [lambda unet: unet, Quantised], ids=["plain", "quantised"])
@pytest.mark.parametrize("as_module", [True, False], ids=["module", "patcher"])
def test_whatever_has_a_model_with_a_diffusion_model_is_taken(wrap, as_module):
    model = hosts.LatentDiffusion()
    unet = model.model.diffusion_model = wrap(model.model.diffusion_model)
    holder = model if as_module else Patcher(unet)
    with torch.no_grad():
        dense = unet(*hosts.compvis_inputs())
        tomesd.apply_patch(model, use_rand=False)
        theirs = unet(*hosts.compvis_inputs())
        tomesd.remove_patch(model)
        assert apply_patch(holder, use_rand=False) is holder
        ours = unet(*hosts.compvis_inputs())
        assert remove_patch(holder) is holder
        restored = unet(*hosts.compvis_inputs())
    assert relative(ours, theirs) < 1e-5 < relative(ours, dense)
    assert torch.equal(restored, dense)


def test_data_parallel_within_a_wrapper_is_refused():
    """Its threads would run one UNet at the same time."""
    model = hosts.LatentDiffusion()
    model.model.diffusion_model = Quantised(nn.DataParallel(model.model.diffusion_model))
    with pytest.raises(UnsupportedModelError, match="DataParallel"):
        apply_patch(model)


@pytest.mark.parametrize("patched_before", [False, True])
@pytest.mark.parametrize(
    ("model", "inputs", "settings", "message"),
    [
        (hosts.sdxl, hosts.sdxl_inputs, {}, "max_downsample=1 merges none; set it to 2 or more"),
        (hosts.unet, hosts.inputs, {"max_downsample": 0}, "max_downsample=0 merges no level; set it to 1"),
        (hosts.unet, hosts.inputs, {"ratio": 0.001}, "ratio=0.001 .* removes none; .* or raise ratio"),
    ],
    ids=["SDXL", "no level", "no token"],
)
def test_where_nothing_would_merge_the_model_runs_dense_as_with_tomesd_and_a_warning_says_why(
    model, inputs, settings, message, patched_before
):
    model = model()
    dense = hosts.call(model, **inputs())
    classes = [type(module) for module in model.modules()]
    if patched_before:
        apply_patch(model, max_downsample=2)
    with pytest.warns(UserWarning, match=f"nothing to merge: .*{message}.*runs unpatched") as caught:
        assert apply_patch(model, **settings) is model
    assert caught[0].filename == __file__
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(hosts.call(model, **inputs()), dense)
    with pytest.raises(NothingToMergeError):
        tokenmerge.apply_token_merging(hosts.unet(), tokenmerge.ToMeConfig(ratio=0.001))


# tomesd runs the last two dense. With the others it raises an IndexError, because there is no destination.
TOO_SMALL = {
    "one row": ((1, 64), {}, r"1 × 64 tokens at level 1.* cells of sy=2 × sx=2"),
    "one column": ((64, 1), {"max_downsample": 2}, r"64 × 1 tokens at level 1.* cells of sy=2 × sx=2"),
    "wide cells": ((4, 3), {"sx": 4, "sy": 3, "ratio": 0.8}, r"4 × 3 tokens at level 1.* sy=3 × sx=4"),
    "one token": ((1, 1), {"max_downsample": 8}, r"1 × 1 tokens at level 1"),
    "a low ratio": ((2, 2), {"ratio": 0.2}, r"2 × 2 tokens at level 1, of which ratio=0\.2"),
}


@pytest.mark.parametrize(("size", "settings", "message"), TOO_SMALL.values(), ids=TOO_SMALL)
def test_a_sample_with_nothing_to_merge_runs_dense_with_one_warning(size, settings, message):
    unet, inputs = hosts.unet(), hosts.inputs(2, *size)
    dense, dense_at_16 = hosts.call(unet, **inputs), hosts.call(unet, **hosts.inputs())
    apply_patch(unet, **settings)
    with pytest.warns(UserWarning, match=f"{message}.*larger image, lower sx and sy.*runs dense") as caught:
        results = [hosts.call(unet, **inputs) for _ in range(3)]
    assert len(caught) == 1
    assert all(torch.equal(result, dense) for result in results)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not torch.equal(hosts.call(unet, **hosts.inputs()), dense_at_16)  # others merge
        assert torch.equal(hosts.call(unet, **inputs), dense)
    with (
        tokenmerge.token_merging(unet, tokenmerge.ToMeConfig(**settings)),
        pytest.raises(NothingToMergeError),
    ):
        hosts.call(unet, **inputs)


@pytest.mark.parametrize("size", [(2, 64), (64, 2), (2, 2)])
def test_a_deep_level_that_is_too_small_runs_dense_without_a_word(size):
    """Level 2 has one row or column: tomesd raises an IndexError there, or leaves one token dense."""
    unet, other, inputs = hosts.unet(), hosts.unet(), hosts.inputs(2, *size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_patch(unet, max_downsample=2, use_rand=False)
        apply_patch(other, max_downsample=1, use_rand=False)
        both = [hosts.call(model, **inputs) for model in (unet, other)]
    assert torch.equal(*both)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_of_the_whole_model_runs_such_a_sample_dense_too(dynamic):
    torch._dynamo.reset()
    unet, inputs = hosts.unet(), hosts.inputs(2, 1, 64)
    dense = hosts.call(unet, **inputs)
    apply_patch(unet)
    compiled = torch.compile(unet, backend=hosts.counting([]), fullgraph=True, dynamic=dynamic)
    with pytest.warns(UserWarning, match="the sample gives too few tokens") as caught:
        assert all(torch.equal(hosts.call(compiled, **inputs), dense) for _ in range(2))
    assert sum("too few tokens" in str(warning.message) for warning in caught) == 1


def test_a_pipeline_with_a_controlnet_is_warned_about_once(pipe):
    control = hosts.controlnet(block_out_channels=(16, 32), norm_num_groups=4)
    parts = {**pipe.components, "controlnet": control, "requires_safety_checker": False}
    pipe = StableDiffusionControlNetPipeline(**parts)
    pipe.set_progress_bar_config(disable=True)
    size = {"height": 2, "width": 32}
    given = {"image": torch.zeros(1, 3, *size.values()), **size, "output_type": "np"}

    def draw() -> np.ndarray:
        return pipe("a", num_inference_steps=2, generator=torch.Generator().manual_seed(0), **given).images

    dense = draw()
    apply_patch(pipe)
    with pytest.warns(UserWarning, match="1 × 16 tokens at level 1") as caught:
        assert np.array_equal(draw(), dense)
    assert sum("tokens at level" in str(warning.message) for warning in caught) == 1


@pytest.mark.parametrize("number", [0.25, 1.0, 2.5, 3, 16, torch.tensor(2), np.float32(1)])
def test_any_number_is_a_deepest_level_as_with_tomesd(number):
    unet = hosts.unet()
    sample, timestep, text = hosts.inputs().values()
    tomesd.apply_patch(unet, max_downsample=number, use_rand=False)
    with torch.no_grad():
        theirs = unet(sample, timestep, encoder_hidden_states=text).sample
    tomesd.remove_patch(unet)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if number < 1 else "error")
        apply_patch(unet, max_downsample=number, use_rand=False)
    assert relative(hosts.call(unet, **hosts.inputs()), theirs) < 1e-5


@pytest.mark.parametrize("ratio", [torch.tensor(0.5), np.array(0.5), np.float64(0.5)])
def test_a_ratio_may_be_in_a_tensor(ratio):
    unet, other = hosts.unet(), hosts.unet()
    apply_patch(unet, ratio=ratio)
    apply_tome(other, ratio=ratio)
    expected = hosts.unet()
    apply_patch(expected, ratio=0.5)
    assert torch.equal(hosts.call(unet, **hosts.inputs()), hosts.call(expected, **hosts.inputs()))
    assert torch.equal(hosts.call(other, **hosts.inputs()), hosts.call(expected, **hosts.inputs()))


@pytest.mark.parametrize("ratio", [0.75, 0.9, 1])
def test_apply_tome_refuses_the_highest_ratio_as_ppdiffusers_does(ratio):
    with pytest.raises(ValueError, match=r"expected less than 1 − 1/\(sx·sy\) = 0.75"):
        apply_tome(hosts.unet(), ratio=ratio)


def test_pipeline_methods_are_there_once_asked_for():
    """In a separate process, because it adds to classes of diffusers."""
    script = """
        import sys; sys.path.insert(0, "tests")
        import hosts, tokenmerge
        unet = hosts.unet()
        assert not hasattr(unet, "apply_tome")
        import tokenmerge.pipeline_methods
        assert unet.apply_tome(0.5, 2) is unet
        assert "_tokenmerge" in unet.__dict__
        assert unet.remove_tome() is unet
        assert "_tokenmerge" not in unet.__dict__
        from diffusers import StableDiffusionControlNetPipeline
        parts = "vae text_encoder tokenizer scheduler safety_checker feature_extractor"
        pipe = StableDiffusionControlNetPipeline(
            **dict.fromkeys(parts.split()),
            unet=unet,
            controlnet=[hosts.controlnet()],
            requires_safety_checker=False,
        )
        assert pipe.apply_tome(ratio=0.749, merge_crossattn=True) is pipe
        assert "_tokenmerge" in unet.__dict__ and "_tokenmerge" in pipe.controlnet.nets[0].__dict__
        try:
            pipe.apply_tome(ratio=0.75)
        except ValueError as error:
            print(error)
        assert "_tokenmerge" in unet.__dict__
        pipe.remove_tome()
        assert "_tokenmerge" not in unet.__dict__ and "_tokenmerge" not in pipe.controlnet.nets[0].__dict__
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "expected less than" in done.stdout
