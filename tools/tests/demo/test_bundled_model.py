"""The bundled models load with plain diffusers, are small, and draw what they are asked for."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tokenmerge import apply_token_merging
from tokenmerge.default_method import settings_for
from tokenmerge_tools import demo
from tokenmerge_tools.demo.glyphs import read_glyphs
from tokenmerge_tools.demo.retrieval import Gallery
from tokenmerge_tools.pipelines.loading import find_model
from tokenmerge_tools.pipelines.meta_model import load_sketch

diffusers = pytest.importorskip("diffusers")

# DPMSolverMultistepScheduler of diffusers 0.42 passes a tensor to numpy in a way that numpy 2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

REFERENCES = sorted((Path(__file__).parent / "references").glob("*.png"))  # 32 px, named by their prompts
SECONDS_TO_LOAD = 3.0
MEGABYTES = 15.0
SHARE_RIGHT = 0.75  # by chance an eighth


LOADS_AS = {"emoji-unet": "StableDiffusionPipeline", "emoji-mmdit": "StableDiffusion3Pipeline"}


def load(name):
    return getattr(diffusers, LOADS_AS[name]).from_pretrained(demo.path(name))


@pytest.fixture(scope="module", params=demo.NAMES)
def pipe(request):
    pipe = load(request.param)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe, prompts, steps, **arguments):
    generators = [torch.Generator().manual_seed(0) for _ in prompts]
    return pipe(
        prompts, num_inference_steps=steps, guidance_scale=3.0, generator=generators, **arguments
    ).images


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'emoji-nut'; use one of 'emoji-unet', 'emoji-mmdit'"):
        demo.path("emoji-nut")


@pytest.mark.parametrize("name", demo.NAMES)
def test_loads_fast(name):
    load(name)  # so that imports are not timed
    start = time.process_time()  # a busy machine takes longer, and does not work more
    load(name)
    assert time.process_time() - start < SECONDS_TO_LOAD


@pytest.mark.parametrize("name", demo.NAMES)
def test_weights_are_small(name):
    weights = demo.path(name).rglob("*.safetensors")
    assert sum(file.stat().st_size for file in weights) < MEGABYTES * 1e6


def test_all_parts_load_in_single_precision(pipe):  # the files hold half precision
    models = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    assert len(models) >= 3
    assert {model.dtype for model in models} == {torch.float32}


def test_words_are_whole_and_any_text_is_accepted(pipe):
    assert len(pipe.tokenizer("A Red APPLE on a light blue background").input_ids) == 8 + 2
    assert pipe.tokenizer.unk_token_id not in pipe.tokenizer("zyzzyva 漢字").input_ids[1:-1]


@pytest.mark.slow
def test_draws_what_is_asked_for(pipe):
    """For most images, the nearest of the references is the one the prompt describes."""
    references = np.stack([np.asarray(Image.open(file), dtype=float) for file in REFERENCES])
    pictures = generate(pipe, [file.stem.replace("_", " ") for file in REFERENCES], steps=8)
    assert {picture.size for picture in pictures} == {(128, 128)}
    small = np.stack(
        [np.asarray(picture.resize((32, 32), Image.Resampling.BOX), dtype=float) for picture in pictures]
    )
    distances = ((small[:, None] - references[None]) ** 2).mean(axis=(2, 3, 4))
    right = distances.argmin(axis=1) == np.arange(len(REFERENCES))
    assert right.mean() >= SHARE_RIGHT


@pytest.mark.slow
def test_second_size(pipe):
    names = [glyph.name for glyph in read_glyphs()]
    steps = 10 if hasattr(pipe, "transformer") else 5  # Euler steps are of first order, the UNet's of second
    (picture,) = generate(pipe, ["a red apple on a white background"], steps=steps, height=256, width=256)
    assert picture.size == (256, 256)
    assert Gallery().identify(picture) == (names.index("a red apple"), "white")


@pytest.mark.parametrize("name", demo.NAMES)
def test_the_plan_is_known_before_a_run(name):
    """By the handle, and by ``tokenmerge inspect`` from the configs alone."""
    pipe, sketch = load(name), load_sketch(find_model(name))
    pipe.set_progress_bar_config(disable=True)
    patch = apply_token_merging(pipe, speedup=2.0)
    assert settings_for(sketch.pipeline, 2.0) == patch.config
    size = {"height": 64, "width": 64}
    side = 64 // sketch.scale
    planned = settings_for(sketch.pipeline, 2.0, side, side, steps=8)
    shown = patch.report(64, 64, steps=8).step_signs
    pipe("a red apple", num_inference_steps=8, output_type="latent", **size)
    assert patch.config == planned
    assert patch.report().step_signs == shown


def test_t5_says_nothing():
    """`StableDiffusion3Pipeline` does not load without it; text features are those of the CLIP encoders."""
    pipe = load("emoji-mmdit")
    text, *_ = pipe.encode_prompt("a red apple", None, None)
    clip_tokens = pipe.tokenizer.model_max_length
    assert text.shape[1] == clip_tokens + 256
    assert not text[:, clip_tokens:].any()
    assert text[:, :clip_tokens].any()
