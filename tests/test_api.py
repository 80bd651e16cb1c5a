"""The verbs on pipelines, ControlNets and CompVis models, and their errors."""

from pathlib import Path

import hosts
import pytest
import tiny_pipeline
import torch
import vits
from diffusers import (
    AutoencoderKL,
    MultiControlNetModel,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
    Transformer2DModel,
    UNet2DModel,
)
from diffusers.models.attention import BasicTransformerBlock
from transformers import GPT2Config, GPT2LMHeadModel

import tokenmerge
from tokenmerge import (
    ConfigError,
    MergeSharing,
    NothingToMergeError,
    ToMeConfig,
    UnsupportedModelError,
    ViTConfig,
    apply_token_merging,
    presets,
    remove_token_merging,
    token_merging,
)
from tokenmerge.config import dense_outside
from tokenmerge.default_method import settings_for
from tokenmerge.plans import pays_from
from tokenmerge.runtime.patching.patch import state_of

HALF = ToMeConfig(ratio=0.5)


class Pipeline:
    """A pipeline as the search for models sees it: an object with attributes."""

    def __init__(self, **components: object) -> None:
        vars(self).update(components)


def is_patched(model: torch.nn.Module) -> bool:
    return "_tokenmerge" in model.__dict__


@pytest.fixture(scope="module")
def pipeline_folder(tmp_path_factory):
    return tiny_pipeline.write_pipeline(tmp_path_factory.mktemp("pipeline") / "tiny")


def test_a_real_pipeline_makes_another_picture_while_merging_and_the_same_after_it(pipeline_folder):
    pipe = StableDiffusionPipeline.from_pretrained(pipeline_folder)
    pipe.set_progress_bar_config(disable=True)

    def picture() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return pipe("a", num_inference_steps=2, generator=generator, output_type="pt").images

    dense = picture()
    with token_merging(pipe, HALF):
        assert not torch.equal(picture(), dense)
    assert torch.equal(picture(), dense)


@pytest.mark.parametrize(
    "make",
    [
        lambda: hosts.controlnet(),
        lambda: [hosts.controlnet(), hosts.controlnet()],
        lambda: MultiControlNetModel([hosts.controlnet(), hosts.controlnet()]),
        lambda: hosts.controlnet_union(),
    ],
    ids=["single", "list", "MultiControlNet", "Union"],
)
def test_controlnets_of_a_pipeline_are_patched_and_restored_with_it(make):
    controlnet = make()
    pipe = Pipeline(
        unet=hosts.unet(), controlnet=controlnet, scheduler=object(), text_encoder=torch.nn.Linear(1, 1)
    )
    nets = getattr(controlnet, "nets", controlnet if isinstance(controlnet, list) else [controlnet])
    patch = apply_token_merging(pipe, HALF)
    assert all(is_patched(net) for net in (pipe.unet, *nets))
    patch.remove()
    assert not any(is_patched(net) for net in (pipe.unet, *nets))


@pytest.mark.parametrize("make", [hosts.controlnet, hosts.controlnet_union])
def test_a_controlnet_merges(make):
    net = make()
    condition = torch.randn(2, 3, 32, 32)
    arguments = {**hosts.inputs(), "controlnet_cond": condition}
    if make is hosts.controlnet_union:
        arguments |= {
            "controlnet_cond": [condition],
            "control_type": torch.tensor([[1.0, 0.0]] * 2),
            "control_type_idx": [0],
            "conditioning_scale": [1.0],
        }
    # A new ControlNet adds zeros; weights of one make its effect visible.
    for module in (*net.controlnet_down_blocks, net.controlnet_mid_block):
        torch.nn.init.ones_(module.weight)

    @torch.no_grad()
    def call() -> torch.Tensor:
        return net(**arguments).mid_block_res_sample

    dense = call()
    with token_merging(net, ToMeConfig(ratio=0)):
        assert torch.equal(call(), dense)
    with token_merging(net, HALF):
        assert call().isfinite().all()
        assert not torch.equal(call(), dense)
    assert torch.equal(call(), dense)


def in_chunks(model):
    """Let MLPs run in chunks. Such layers do not merge."""
    for module in model.modules():
        if isinstance(module, BasicTransformerBlock):
            module.set_chunk_feed_forward(2)


def test_a_controlnet_with_nothing_to_merge_stays_dense_beside_a_unet_that_merges():
    """Also if it merged with the previous settings."""
    controlnet = hosts.controlnet()
    in_chunks(controlnet)
    pipe = Pipeline(unet=hosts.unet(), controlnet=controlnet)
    apply_token_merging(pipe, HALF)
    assert is_patched(controlnet)
    patch = apply_token_merging(pipe, ToMeConfig(ratio=0.5, merge_attn=False, merge_mlp=True))
    assert is_patched(pipe.unet)
    assert not is_patched(controlnet)
    assert "ControlNetModel has MLP that can merge" in patch.report().notes[-1]


def test_a_unet_with_nothing_to_merge_is_an_error_beside_a_controlnet_that_would():
    unet = hosts.unet()
    in_chunks(unet)
    pipe = Pipeline(unet=unet, controlnet=hosts.controlnet())
    with pytest.raises(NothingToMergeError, match="of UNet2DConditionModel"):
        apply_token_merging(pipe, ToMeConfig(ratio=0.5, merge_attn=False, merge_mlp=True))
    assert not is_patched(pipe.controlnet)


def test_a_patched_pipeline_can_become_another(pipeline_folder):
    pipe = StableDiffusionPipeline.from_pretrained(pipeline_folder)
    apply_token_merging(pipe, HALF)
    for other in (StableDiffusionImg2ImgPipeline.from_pipe(pipe), StableDiffusionPipeline(**pipe.components)):
        assert other.unet is pipe.unet
        assert is_patched(other.unet)


def test_a_pipeline_with_an_unexpected_module_is_patched(pipeline_folder):
    pipe = StableDiffusionPipeline.from_pretrained(pipeline_folder)
    pipe.register_modules(extra=torch.nn.Linear(1, 1))
    apply_token_merging(pipe, HALF)
    assert is_patched(pipe.unet)


@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_a_compvis_model_merges_and_has_the_gradients_of_no_checkpointing(use_checkpoint):
    model = hosts.LatentDiffusion(use_checkpoint=use_checkpoint)
    unet = model.model.diffusion_model
    dense = unet(*hosts.compvis_inputs())
    patch = apply_token_merging(model, ToMeConfig(ratio=0))
    assert torch.equal(unet(*hosts.compvis_inputs()), dense)
    patch = apply_token_merging(model, ToMeConfig(ratio=0.5, merge_crossattn=True, merge_mlp=True))
    merged = unet(*hosts.compvis_inputs())
    assert not torch.equal(merged, dense)
    merged.square().mean().backward()
    plain = hosts.LatentDiffusion(use_checkpoint=False)
    apply_token_merging(plain, ToMeConfig(ratio=0.5, merge_crossattn=True, merge_mlp=True))
    plain.model.diffusion_model(*hosts.compvis_inputs()).square().mean().backward()
    for a, b in zip(unet.parameters(), plain.model.diffusion_model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    patch.remove()
    assert torch.equal(unet(*hosts.compvis_inputs()), dense)


def test_the_finest_level_that_can_merge_always_does():
    """SDXL has no attention at level 1."""
    unet = hosts.sdxl()
    dense = hosts.call(unet, **hosts.sdxl_inputs())
    patch = apply_token_merging(unet, HALF)
    assert {row.level for row in patch.report().rows} == {2}
    assert not torch.equal(hosts.call(unet, **hosts.sdxl_inputs()), dense)
    with token_merging(hosts.unet(), HALF) as patch:
        assert {row.level for row in patch.report().rows} == {1}


def test_a_model_without_transformer_blocks_is_an_error():
    unet = hosts.unet(
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
        mid_block_type="UNetMidBlock2D",
    )
    with pytest.raises(NothingToMergeError, match="UNet2DConditionModel has no transformer block"):
        apply_token_merging(unet, HALF)


def test_a_model_that_is_too_small_is_an_error():
    with pytest.raises(NothingToMergeError, match="the sample gives 1 × 1 tokens"):
        apply_token_merging(hosts.unet(sample_size=1), HALF)


def test_a_ratio_that_removes_no_token_is_an_error():
    with pytest.raises(NothingToMergeError, match=r"ratio=0\.001 .* raise ratio"):
        apply_token_merging(hosts.unet(), ToMeConfig(ratio=0.001))


CODEC = AutoencoderKL(block_out_channels=(32,))
WRITER = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10))


@pytest.mark.parametrize(
    "thing",
    [
        torch.nn.Linear(2, 2),
        Transformer2DModel(1, 8, in_channels=32),  # a part of a UNet
        CODEC,
        WRITER,
        None,
    ],
)
def test_something_else_is_an_error_that_names_it_and_where_the_supported_classes_are(thing):
    with pytest.raises(UnsupportedModelError) as raised:
        apply_token_merging(thing, HALF)
    assert str(raised.value).startswith(f"found {type(thing).__name__}; pass a diffusers pipeline")
    assert "docs/supported-models.md" in str(raised.value)


def test_a_denoiser_in_which_nothing_merges_is_refused_with_the_reason_and_what_speeds_it_up():
    with pytest.raises(
        UnsupportedModelError,
        match=r"in UNet2DModel yet: its attention takes an image .*supported-models\.md",
    ) as raised:
        apply_token_merging(UNet2DModel(block_out_channels=(32, 32, 32, 32)), HALF)
    assert str(raised.value).endswith(
        "step reuse alone speeds up its pipeline: apply_token_merging(pipe, speedup=2.0)"
    )


@pytest.mark.parametrize("name", ["owner/name", Path("models") / "mine", "x" * 1000])
def test_a_name_is_to_be_loaded_first(name):
    words = r"^found the name '.*load it first with diffusers"
    with pytest.raises(UnsupportedModelError, match=words) as raised:
        apply_token_merging(name, HALF)
    assert len(str(raised.value)) < 400


def test_a_pipeline_without_its_denoiser_is_told_so():
    pipe = Pipeline(unet=None, vae=CODEC)
    with pytest.raises(UnsupportedModelError, match="found Pipeline, whose unet is None; load it with"):
        apply_token_merging(pipe, HALF)


def test_a_pipeline_without_a_supported_model_names_its_parts():
    with pytest.raises(UnsupportedModelError, match="found Conv2d, Linear;"):
        remove_token_merging(Pipeline(a=torch.nn.Linear(1, 1), b=torch.nn.Conv2d(1, 1, 1), c=3))


def test_the_message_stays_short_however_many_parts_there_are():
    parts = {f"part{i}": type(f"Part{i}" * 5, (torch.nn.Module,), {})() for i in range(30)}
    with pytest.raises(UnsupportedModelError, match="and 26 more;") as raised:
        apply_token_merging(Pipeline(**parts), HALF)
    assert len(str(raised.value)) < 400


def test_anything_else_in_place_of_a_configuration_is_an_error():
    with pytest.raises(ConfigError, match=r"expected a ToMeConfig, .* got \['half'\]"):
        apply_token_merging(hosts.unet(), ["half"])


def test_an_error_keeps_the_patch_that_was_there():
    unet = hosts.unet()
    apply_token_merging(unet, HALF)
    merged = hosts.call(unet, **hosts.inputs())
    with pytest.raises(NothingToMergeError):
        apply_token_merging(unet, ToMeConfig(ratio=0.001))
    assert torch.equal(hosts.call(unet, **hosts.inputs()), merged)


def test_the_context_puts_back_what_was_there():
    unet = hosts.unet()
    dense = hosts.call(unet, **hosts.inputs())
    apply_token_merging(unet, HALF)
    merged = hosts.call(unet, **hosts.inputs())

    def fail() -> None:
        with token_merging(unet, ToMeConfig(ratio=0.25)):
            assert not torch.equal(hosts.call(unet, **hosts.inputs()), merged)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(hosts.call(unet, **hosts.inputs()), merged)
    remove_token_merging(unet)
    with token_merging(unet, HALF):
        pass
    assert torch.equal(hosts.call(unet, **hosts.inputs()), dense)


def test_contexts_nest_and_leave_an_outer_handle_alive():
    unet = hosts.unet()
    with token_merging(unet, HALF), token_merging(unet, ToMeConfig(ratio=0.25)):
        pass
    assert not is_patched(unet)
    patch = apply_token_merging(unet, HALF)
    with token_merging(unet, ToMeConfig(ratio=0.25)):
        pass
    with patch.record() as plans:
        hosts.call(unet, **hosts.inputs())
    assert len(plans) == 3
    patch.remove()
    assert not is_patched(unet)


def test_the_recorder_of_a_recorder_goes_on_afterwards():
    unet = hosts.unet()
    patch = apply_token_merging(unet, HALF)
    with patch.record() as outer:
        with patch.record() as inner:
            pass
        hosts.call(unet, **hosts.inputs())
    assert (len(outer), len(inner)) == (3, 0)


def test_an_old_handle_does_not_remove_a_newer_patch():
    unet = hosts.unet()
    old = apply_token_merging(unet, HALF)
    apply_token_merging(unet, ToMeConfig(ratio=0.25))
    old.remove()
    assert is_patched(unet)


def test_recorded_plans_are_the_latest_of_each_block_that_merges():
    unet = hosts.unet()
    patch = apply_token_merging(unet, HALF)
    with patch.record() as plans:
        hosts.call(unet, **hosts.inputs())
        hosts.call(unet, **hosts.inputs(1, 8, 12))
    assert sorted(plans) == [row.path for row in sorted(patch.report().rows, key=lambda row: row.path)]
    for recorded in plans.values():
        assert recorded.grid == (1, 8, 12)
        labels = recorded.plan.labels()
        assert labels.shape == (1, 96)
        assert sorted(labels.unique().tolist()) == list(range(48))
    hosts.call(unet, **hosts.inputs())
    assert next(iter(plans.values())).grid == (1, 8, 12)


def test_the_compiled_wrapper_of_a_model_is_looked_through():
    unet = hosts.unet()
    apply_token_merging(torch.compile(unet, backend="eager"), HALF)
    assert is_patched(unet)


def test_the_package_says_its_version():
    assert tokenmerge.__version__.count(".") == 2


def test_calls_that_people_try(monkeypatch):
    """A ratio as a keyword, the name of a preset, and both together."""
    monkeypatch.setattr("tokenmerge.default_method.fewest_tokens", lambda *_: pays_from(16))
    unet = hosts.unet()
    for given, wanted in (
        (
            {"ratio": 0.4},
            ToMeConfig(
                ratio=0.4, planner="tiled", proportional=True, merge_sharing=MergeSharing(blocks=True)
            ),
        ),
        ({"speedup": 1.2}, settings_for(unet, 1.2)),
        ({"config": "tomesd"}, presets.tomesd()),
        ({"config": "sito", "ratio": 0.4}, presets.sito(0.4)),
    ):
        patch = apply_token_merging(unet, **given)
        assert state_of(unet).config == wanted
        assert patch.config == wanted
        asked = "speedup=1.2" if "speedup" in given else f"ratio {wanted.ratio:g}"
        assert asked in repr(patch).splitlines()[0] or given == {"ratio": 0.4}
        patch.remove()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": "tomme"}, r"expected the name of a preset, one of ca_tome, .* did you mean 'tomesd'\?"),
        ({"config": "0.5"}, r"got '0\.5'; or write .*speedup=2\.0"),
        ({"ratio": 0.95}, r"= 0\.75 .* got 0\.95; take a lower ratio, or a ToMeConfig with a larger sx"),
        ({"config": 0.5, "ratio": 0.4}, r"expected one of them, got config=0\.5, ratio=0\.4"),
        ({"ratio": 0.5, "speedup": 2.0}, r"expected one of them, got speedup=2\.0, ratio=0\.5"),
        (
            {"config": "toma", "speedup": 2.0},
            r"got config='toma', speedup=2\.0; write apply_token_merging\(pipe, speedup",
        ),
        ({"ratio": "0.5"}, r"ratio: expected a number from 0 .* got '0\.5'"),
    ],
)
def test_calls_that_cannot_be_meant(given, message):
    with pytest.raises(ConfigError, match=message):
        apply_token_merging(hosts.unet(), **given)


def test_start_and_until_add_rules():
    unet = hosts.unet()
    falling = ToMeConfig(ratio=0.5, rules=[{"start": 0.4, "ratio": 0.3}])
    for given, wanted in (
        ({"start": 0.2}, dense_outside(0.2, 1)),
        ({"start": 0.6, "until": 0.9}, dense_outside(0.6, 0.9)),
        ({"until": 0.8}, dense_outside(0, 0.8)),
        ({"start": 0.0, "until": 1.0}, ()),
    ):
        assert apply_token_merging(unet, falling, **given).config.rules == (*falling.rules, *wanted)
    with pytest.raises(ConfigError, match=r"start: expected less than until=0\.5, got 0\.5"):
        apply_token_merging(unet, falling, start=0.5, until=0.5)
    with pytest.raises(ConfigError, match="start, until: a vision transformer has no denoising steps"):
        apply_token_merging(vits.vit(), ViTConfig(r=1), until=0.5)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"speed_up": 2}, "speed_up: .* got speed_up=2; did you mean 'speedup'"),
        ({"merge_ratio": 0.5}, "merge_ratio: .* did you mean 'ratio'"),
        (
            {"max_downsample": 2, "ratio": 0.5},
            r"max_downsample: .* as ToMeConfig\(ratio=0.5, max_downsample=…\)",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_argument_that_there_is_not_names_the_nearest_one(given, told):
    unet = hosts.unet()
    with pytest.raises(TypeError, match=told):
        apply_token_merging(unet, **given)
    with pytest.raises(TypeError, match=told), token_merging(unet, **given):
        pass
    assert state_of(unet) is None


def test_the_context_takes_all_arguments(pipe):
    with token_merging(pipe, speedup=2.0, min_psnr=35, until=0.5) as patch:
        assert "min_psnr 35" in str(patch)
