"""Block caches as variants: active within the context, reset for each generation, refused with a message."""

import numpy as np
import pytest
import torch

from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge_tools.pipelines.loading import denoiser_name, denoiser_of, find_model, load_pipeline, twin
from tokenmerge_tools.variants.variant import parse_variant

# DPMSolverMultistepScheduler of diffusers 0.42 passes a tensor to numpy in a way that numpy 2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

STEPS = 6


def load(name):
    if name == "emoji-unet":
        pytest.importorskip("DeepCache")
    pipe = load_pipeline(find_model(name), torch.float32, torch.device("cpu"))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe):
    generator = torch.Generator().manual_seed(1)
    arguments = {"num_inference_steps": STEPS, "height": 64, "width": 64, "output_type": "np"}
    return pipe("a red apple", generator=generator, **arguments).images


def calls_of(module):
    """Record the calls of a module that a cache skips."""
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    return calls


def spec_of(text):
    (spec,) = parse_variant(text, [0.5])
    return spec


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "deep", "expected"),
    [
        ("emoji-unet", "deepcache:interval=2", "mid_block.resnets.0", 3),
        ("emoji-unet", "deepcache", "mid_block.resnets.0", 2),
        ("emoji-mmdit", "first-block-cache:threshold=1e-6", "transformer_blocks.2.ff", STEPS),
        ("emoji-mmdit", "first-block-cache:threshold=1e6", "transformer_blocks.2.ff", 1),
    ],
)
def test_deep_layers_run_in_so_many_steps_of_each_generation(name, text, deep, expected):
    pipe = load(name)
    dense = draw(pipe)
    copied = twin(pipe)
    calls = calls_of(getattr(copied, denoiser_name(copied)).get_submodule(deep))
    with spec_of(text).apply(copied, None):
        first, second = draw(copied), draw(copied)
    assert len(calls) == 2 * expected
    assert np.array_equal(first, second)
    assert np.array_equal(first, dense) == (expected == STEPS)
    if text.startswith("deepcache"):
        assert not any("forward" in module.__dict__ for module in copied.unet.modules())
    assert np.array_equal(draw(copied), dense)
    assert np.array_equal(draw(pipe), dense)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("emoji-mmdit", "deepcache", "deepcache needs a UNet, and StableDiffusion3Pipeline has none"),
        ("emoji-unet", "first-block-cache", "does not know the transformer blocks of UNet2DConditionModel"),
    ],
)
def test_the_wrong_architecture_is_refused(name, text, words):
    with pytest.raises(UnsupportedModelError, match=words), spec_of(text).apply(load(name), None):
        pass


@pytest.mark.parametrize("text", ["deepcache:interval=1.5", "deepcache:interval=1"])
def test_an_interval_is_a_whole_number(text):
    with pytest.raises(ConfigError, match=r"expected an integer ≥ 2, got 1"):
        spec_of(text).apply(load("emoji-unet"), None).__enter__()


@pytest.mark.parametrize(
    "text", ["deepcache:ratio=0.5", "first-block-cache:threshold=x", "deepcache:interval=-2"]
)
def test_a_wrong_setting_names_the_right_one(text):
    name, _, given = text.partition(":")
    with pytest.raises(ConfigError, match=rf"variant: expected {name}:\w+=NUMBER.* got '{given}'"):
        parse_variant(text, [0.5])


def test_the_settings_have_defaults():
    assert [spec_of(name).label for name in ("deepcache", "first-block-cache")] == [
        "deepcache interval=3",
        "first-block-cache threshold=0.05",
    ]


def test_a_denoiser_alone_has_no_steps_to_follow():
    with pytest.raises(ConfigError, match="needs the denoising steps of a pipeline"):
        spec_of("first-block-cache").apply(denoiser_of(load("emoji-mmdit")), None).__enter__()
