"""The table of rivals on tiny models of SD3's, FLUX's and a UNet's shape: each skips, repeats, is removed."""

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)

from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge_tools.pipelines.counting import counting
from tokenmerge_tools.pipelines.loading import twin
from tokenmerge_tools.records.kinds import key_of
from tokenmerge_tools.variants import formulas
from tokenmerge_tools.variants.generation import Generation
from tokenmerge_tools.variants.rivals import RIVALS
from tokenmerge_tools.variants.variant import parse_variant

pytestmark = pytest.mark.filterwarnings("ignore:torch.meshgrid:UserWarning")  # diffusers

STEPS, TEXT = 10, 16
# A strong setting of each rival of transformers, with which it skips something on random weights.
STRONG = {
    "first-block-cache": "threshold=0.5",
    "taylorseer": "interval=3",
    "magcache": "threshold=0.5",
    "seacache": "threshold=2",
    "fastercache": "interval=2",
    "pyramid": "interval=2",
    "cache-dit": "threshold=0.9,forecast=foca",
    "easycache": "threshold=2",
    "dicache": "threshold=2",
    "sada": "",
}


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.fixture(scope="module")
def pipes():
    torch.manual_seed(0)
    sizes = {"num_layers": 3, "attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": TEXT}
    sd3 = SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, out_channels=4, caption_projection_dim=16,
        pooled_projection_dim=TEXT, pos_embed_max_size=8, **sizes,
    )  # fmt: skip
    flux = FluxTransformer2DModel(
        in_channels=16, pooled_projection_dim=TEXT, axes_dims_rope=(2, 2, 4), num_single_layers=2,
        guidance_embeds=True, **sizes,
    )  # fmt: skip
    empty = dict.fromkeys(
        ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "image_encoder", "feature_extractor")
    )
    codec = AutoencoderKL(block_out_channels=(4,), norm_num_groups=4, latent_channels=4)
    made = {
        "sd3": StableDiffusion3Pipeline(
            transformer=sd3, scheduler=FlowMatchEulerDiscreteScheduler(), vae=codec, text_encoder_3=None,
            tokenizer_3=None, **empty,
        ),
        "flux": FluxPipeline(
            transformer=flux, scheduler=FlowMatchEulerDiscreteScheduler(), vae=codec, **empty
        ),
    }  # fmt: skip
    for pipe in made.values():
        pipe.set_progress_bar_config(disable=True)
        pipe.transformer.eval()
    return made


def draw(pipe, **changes) -> np.ndarray:
    own = {"prompt_embeds": noise(1, 3, TEXT), "pooled_prompt_embeds": noise(1, TEXT)}
    two_passes = changes.pop("two_passes", False)
    if isinstance(pipe, StableDiffusion3Pipeline) or two_passes:
        own |= {f"negative_{name}": -value for name, value in own.items()}
    if two_passes:
        own["true_cfg_scale"] = 3.0
    arguments = {"num_inference_steps": STEPS, "height": 8, "width": 8, "output_type": "latent", **changes}
    return pipe(**own, **arguments, generator=torch.Generator().manual_seed(1)).images.numpy()


def spec_of(text):
    (spec,) = parse_variant(text, [0.5])
    return spec


def state(pipe):
    return {
        (path, name): id(value)
        for path, module in pipe.transformer.named_modules()
        for name, value in module.__dict__.items()
    } | {"class": type(pipe), "scheduler": "step" in pipe.scheduler.__dict__}


@pytest.fixture(scope="module")
def dense(pipes):
    drawn = {}
    for name, pipe in pipes.items():
        with counting(pipe.transformer) as counted:
            picture = draw(pipe)
        drawn[name] = picture, counted.flops
    return drawn


@pytest.mark.parametrize("model", ["sd3", "flux"])
@pytest.mark.parametrize("name", STRONG)
def test_each_rival_skips_repeats_and_leaves_nothing(pipes, dense, model, name):
    if RIVALS[name].missing():
        pytest.skip("not installed")
    picture, operations = dense[model]
    copied = twin(pipes[model])
    before = state(copied)
    with spec_of(f"{name}:{STRONG[name]}" if STRONG[name] else name).apply(copied, None):
        with counting(copied.transformer) as counted:
            first = draw(copied)
        assert np.array_equal(draw(copied), first)
        assert np.array_equal(draw(pipes[model]), picture)  # another pipeline of the class is not changed
    assert np.isfinite(first).all()
    assert not np.array_equal(first, picture)
    assert counted.calls == STEPS
    assert 0 < counted.flops < operations
    assert state(copied) == before
    assert np.array_equal(draw(copied), picture)


@pytest.mark.parametrize(
    "text",
    ["first-block-cache", "magcache", "seacache", "easycache", "dicache"],
)
def test_the_weakest_setting_draws_the_dense_picture(pipes, dense, text):
    copied = twin(pipes["sd3"])
    with spec_of(f"{text}:threshold=1e-9").apply(copied, None):
        assert np.array_equal(draw(copied), dense["sd3"][0])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pyramid", "keeps one state, and this pipeline guides in two calls"),
        ("fastercache", "keeps one state"),
    ],
)
def test_a_cache_with_one_state_is_refused_where_guidance_takes_two_calls(pipes, name, words):
    copied = twin(pipes["flux"])
    with spec_of(name).apply(copied, None), pytest.raises(UnsupportedModelError, match=f"{name} {words}"):
        draw(copied, two_passes=True)


@pytest.mark.parametrize("name", ["easycache", "seacache", "dicache"])
def test_two_passes_of_guidance_have_states_of_their_own(pipes, name):
    copied = twin(pipes["flux"])
    with spec_of(f"{name}:threshold=1e-9").apply(copied, None):
        exact = draw(copied, two_passes=True)
    assert np.array_equal(exact, draw(pipes["flux"], two_passes=True))
    with spec_of(f"{name}:{STRONG[name]}").apply(copied, None), counting(copied.transformer) as counted:
        draw(copied, two_passes=True)
    assert counted.calls == 2 * STEPS


@pytest.mark.parametrize("name", ["taylorseer", "magcache", "seacache", "fastercache", "dicache", "sada"])
def test_a_rival_of_transformers_says_why_it_does_not_run_on_a_unet(pipe, name):
    words = (
        "is here for flow matching" if name == "sada" else "does not know the transformer blocks of UNet2D"
    )
    with pytest.raises(UnsupportedModelError, match=f"{name} {words}.*leave it out"):
        spec_of(name).apply(pipe, None).__enter__()


def test_pyramid_attention_broadcast_runs_on_a_unet(pipe):
    def drawn():
        made = pipe(
            "red apple", num_inference_steps=6, output_type="np", generator=torch.Generator().manual_seed(0)
        )
        return made.images

    with counting(pipe.unet) as whole:
        dense = drawn()
    with spec_of("pyramid").apply(pipe, None), counting(pipe.unet) as cached:
        assert not np.array_equal(drawn(), dense)
    assert 0 < cached.flops < whole.flops
    assert np.array_equal(drawn(), dense)


def test_easycache_follows_its_formula():
    """x falls by 1 in each step, and v = 2x: k = 2, so the change of j skipped steps is Σ 2·j/|v₀|."""
    known = []

    class Model(torch.nn.Module):
        def forward(self, sample):
            known.append(float(sample))
            return (2 * sample,)

    class Pipe:
        def __init__(self):
            self.unet = Model()
            self.scheduler = type("Scheduler", (), {"timesteps": range(20), "step": lambda self: None})()

        def __call__(self, x=0):
            outputs = []
            for step in range(20):
                outputs.append(float(self.unet(torch.tensor([100.0 - step]))[0]))
                self.scheduler.step()
            return outputs

    pipe = Pipe()
    with spec_of("easycache:threshold=0.065").apply(pipe, None):
        outputs = pipe()
    # Steps 0 to 2 are within the first 15 %, 3 to 5 … sum to 2·(1 + 2)/196 = 0.031 and + 2·3/196 = 0.061,
    # and + 2·4/196 passes 0.065.
    assert known[:4] == [100.0, 99.0, 98.0, 94.0]
    assert outputs[3] == 97 + 98  # x + (v₀ - x₀)


def test_the_settings_are_those_of_the_table():
    for name, kind in RIVALS.items():
        if kind.number is not None:
            assert kind.ladder == tuple(sorted(kind.ladder))
            assert kind.number[1] in kind.ladder
            of_default, given = spec_of(name), spec_of(f"{name}:{kind.number[0]}={kind.number[1]}")
            assert key_of(dict(of_default.settings)) == key_of(dict(given.settings))
            found = parse_variant(f"{name}:all", [0.5])
            assert [dict(spec.settings)[kind.number[0]] for spec in found] == list(kind.ladder)
    labels = [spec.label for spec in parse_variant("rivals", [0.5])]
    assert len(labels) == len(RIVALS)
    assert "seacache threshold=0.25" in labels
    assert len(parse_variant("rivals:all", [0.5])) > 40
    with pytest.raises(ConfigError, match="variant: sada takes no settings, got 'x=1'"):
        parse_variant("sada:x=1", [0.5])


def test_a_forecast_is_one_of_those_that_cache_dit_has(pipes):
    pytest.importorskip("cache_dit")
    for text in ("forecast=none", "forecast=dmd,taylor=1"):
        with pytest.raises(ConfigError, match="forecast: expected one of dmd, foca, without taylor"):
            spec_of(f"cache-dit:{text}").apply(twin(pipes["sd3"]), None)


def test_the_blocks_of_a_model_come_in_their_order(pipes):
    blocks = formulas.transformer_blocks(Generation("x", pipes["flux"]))
    assert [type(block).__name__ for block in blocks] == [
        *["FluxTransformerBlock"] * 3,
        *["FluxSingleTransformerBlock"] * 2,
    ]
