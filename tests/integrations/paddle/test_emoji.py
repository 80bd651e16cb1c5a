"""The bundled model, converted to ppdiffusers, and the two examples of ppdiffusers' page on ToMe with it."""

import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import cv2
import numpy as np
import paddle
import pytest
from paddle_hosts import everything
from PIL import Image
from ppdiffusers import ControlNetModel

from tokenmerge import ToMeConfig
from tokenmerge.paddle import apply_patch, remove_patch, token_merging

ROOT = Path(__file__).parents[3]
PROMPT = "a grinning face on a light blue background"


@pytest.fixture(scope="module")
def pipe():
    return runpy.run_path(str(ROOT / "benchmarks" / "paddle" / "convert.py"))["pipeline"]()


@pytest.fixture(scope="module")
def torch():
    """The results of the PyTorch pipeline."""
    with np.load(ROOT / "tests" / "integrations" / "portable" / "emoji.npz") as written:
        return dict(written)


def draw(pipe, **settings):
    """An image as numbers from 0 to 1."""
    settings = {"height": 128, "width": 128, "num_inference_steps": 4, "guidance_scale": 3.0, **settings}
    generator = paddle.Generator().manual_seed(0)
    return pipe(PROMPT, generator=generator, output_type="np", **settings).images


# float32 through some tens of layers; the model's own values are near 1.
def test_the_same_latents_in_the_same_noise_out(pipe, torch):
    text, latents = paddle.to_tensor(torch["text"]), paddle.to_tensor(torch["latents"])
    with paddle.no_grad():
        for timestep, noise in zip((999, 499, 49), torch["noise"], strict=True):
            ours = pipe.unet(latents, timestep, encoder_hidden_states=text).sample.numpy()[0]
            assert np.abs(ours - noise).max() < 1e-3


def test_the_text_and_the_decoded_picture_are_the_same(pipe, torch):
    length = pipe.tokenizer.model_max_length
    ids = pipe.tokenizer(PROMPT, padding="max_length", max_length=length, return_tensors="pd").input_ids
    assert np.array_equal(ids.numpy(), torch["ids"])
    with paddle.no_grad():
        assert np.abs(pipe.text_encoder(ids)[0].numpy() - torch["text"]).max() < 1e-3
        picture = pipe.vae.decode(paddle.to_tensor(torch["latents"])).sample.numpy()
    assert np.abs(picture - torch["picture"]).max() < 1e-3
    assert np.abs(pipe.scheduler.alphas_cumprod.numpy() - torch["alphas"]).max() < 1e-6


def test_a_merged_picture_is_close_and_the_same_seed_gives_the_same_one(pipe):
    dense, before = draw(pipe), everything(pipe.unet)
    apply_patch(pipe, ratio=0.5)
    merged, again = draw(pipe), draw(pipe)
    remove_patch(pipe)
    assert np.array_equal(merged, again)
    psnr = -10 * np.log10(np.mean((merged - dense) ** 2))
    assert 15 < psnr < 60
    assert np.array_equal(draw(pipe), dense)
    assert everything(pipe.unet) == before


def test_a_picture_is_the_same_in_any_batch(pipe):
    noise = paddle.to_tensor(np.random.default_rng(1).standard_normal((3, 4, 32, 32)).astype("float32"))
    with token_merging(pipe, ToMeConfig(ratio=0.5, max_downsample=2)):
        together = draw(pipe, latents=noise, num_images_per_prompt=3)
        alone = draw(pipe, latents=noise[1:2])
    # Float32 products of another shape are summed in another order, four steps long.
    assert np.abs(together[1] - alone[0]).max() < 1e-3


@pytest.fixture(scope="module")
def folders(pipe, tmp_path_factory):
    """The pipeline and a ControlNet as saved models, and an image of edges."""
    where = tmp_path_factory.mktemp("models")
    pipe.save_pretrained(str(where / "emoji"))
    # An image is four times as wide as its latents here.
    controlnet = ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(16, 32, 96))
    for layer in [*controlnet.controlnet_down_blocks, controlnet.controlnet_mid_block]:
        layer.weight.set_value(0.01 * paddle.randn(layer.weight.shape))
    controlnet.save_pretrained(str(where / "controlnet"))
    edges = cv2.Canny((draw(pipe)[0] * 255).astype("uint8"), 100, 200)
    Image.fromarray(np.stack([edges] * 3, axis=2)).save(where / "canny.png")
    return where


TEXT_TO_IMAGE = """
    import paddle
    import tokenmerge.paddle.pipeline_methods
    from ppdiffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained("emoji", safety_checker=None)

    # Apply ToMe with a 50% merging ratio
    pipe.apply_tome(ratio=0.5) # Can also use pipe.unet in place of pipe here

    generator = paddle.Generator().manual_seed(0)
    image = pipe("a photo of an astronaut riding a horse on mars", generator=generator).images[0]
    image.save("astronaut.png")
"""
CONTROLNET = """
    import paddle
    import tokenmerge.paddle.pipeline_methods
    from ppdiffusers import ControlNetModel, StableDiffusionControlNetPipeline
    from ppdiffusers.utils import load_image

    controlnet = ControlNetModel.from_pretrained("controlnet")
    pipe = StableDiffusionControlNetPipeline.from_pretrained(
        "emoji", safety_checker=None, controlnet=controlnet
    )

    # Apply ToMe with a 50% merging ratio
    pipe.apply_tome(ratio=0.5) # Can also use pipe.unet in place of pipe here

    generator = paddle.Generator().manual_seed(0)
    prompt = "bird"
    image = load_image("canny.png")

    image = pipe(prompt, image, generator=generator).images[0]

    image.save("bird.png")
"""
CHECK = """
    from ppdiffusers.models.attention import BasicTransformerBlock
    own = [type(m).__name__ for m in pipe.unet.sublayers() if type(m).__name__.startswith("ToMe")]
    assert not own, own
    patched = [m for m in pipe.unet.sublayers() if "_tokenmerge" in m.__dict__]
    assert patched
    assert pipe.remove_tome() is pipe
    assert not [m for m in pipe.unet.sublayers() if "_tokenmerge" in m.__dict__]
    assert pipe.unet.apply_tome(ratio=0.5) is pipe.unet
    assert pipe.unet.remove_tome(only_return_self=False) == (pipe.unet, [pipe.unet])
    try:
        pipe.apply_tome(ratio=0.75)
    except ValueError as error:
        assert "0.75" in str(error)
    else:
        raise AssertionError("no error")
"""


@pytest.mark.parametrize(
    ("example", "picture"),
    [(TEXT_TO_IMAGE, "astronaut.png"), (CONTROLNET, "bird.png")],
    ids=["text", "canny"],
)
def test_the_examples_of_ppdiffusers_run_as_written(example, picture, folders):
    """Except for the import, the model's path and fp32. In a separate process, as it changes classes."""
    script = textwrap.dedent(example) + textwrap.dedent(CHECK)
    subprocess.run([sys.executable, "-c", script], cwd=folders, check=True, capture_output=True, text=True)
    assert np.asarray(Image.open(folders / picture)).std() > 10  # an image, and not one colour
