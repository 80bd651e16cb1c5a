from __future__ import annotations

import inspect
import json
import shutil
import sys

import diffusers
import kernels
import pytest
import tiny_pipeline
import torch
from diffusers.models import AttentionBackendName, attention_dispatch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from safetensors.torch import load_file, save_file
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES
from torch.testing import assert_close

from tokenmerge import ToMeConfig
from tokenmerge.errors import ConfigError, MissingExtraError, UnsupportedModelError
from tokenmerge.report import predict
from tokenmerge_tools import demo
from tokenmerge_tools.cli import main
from tokenmerge_tools.drawing import Studio
from tokenmerge_tools.pipelines.loading import (
    ModelSource,
    SourceKind,
    denoiser_name,
    find_model,
    load_pipeline,
)
from tokenmerge_tools.pipelines.meta_model import load_sketch
from tokenmerge_tools.pipelines.settings import (
    SCHEDULER_NAMES,
    resolve_device,
    resolve_dtype,
    scheduler_class_name,
    set_attention,
    set_scheduler,
)

CPU = torch.device("cpu")
# Schedulers of diffusers pass torch tensors to np.array in a way that numpy 2 deprecates.
ignore_array_copy = "ignore:__array__ implementation doesn't accept:DeprecationWarning"
# diffusers passes huggingface_hub an argument that it no longer reads.
ignore_symlinks = "ignore:The `local_dir_use_symlinks` argument:UserWarning"
pytestmark = [pytest.mark.filterwarnings(ignore_array_copy), pytest.mark.filterwarnings(ignore_symlinks)]


@pytest.fixture(scope="module")
def controlnet(tmp_path_factory):
    return tiny_pipeline.write_controlnet(tmp_path_factory.mktemp("controlnets") / "tiny")


@pytest.fixture
def pipe(folder):
    return load_pipeline(find_model(str(folder)), torch.float32, CPU)


# --- what --model may be ----------------------------------------------------------------------


def test_each_kind_of_model_is_recognised(folder, tmp_path):
    checkpoint = tmp_path / "sd.safetensors"
    checkpoint.touch()
    assert find_model("emoji-unet") == ModelSource(SourceKind.DEMO, str(demo.path("emoji-unet")))
    assert find_model(str(folder)) == ModelSource(SourceKind.FOLDER, str(folder))
    assert find_model(str(checkpoint)) == ModelSource(SourceKind.CHECKPOINT, str(checkpoint))
    assert find_model("owner/name-1.5") == ModelSource(SourceKind.HUB, "owner/name-1.5")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such-model", r"'no-such-model'.*emoji-unet.*model_index\.json.*safetensors.*owner/name"),
        ("./no/such/folder", r"there is no folder \./no/such/folder; expected a bundled model"),
        ("../models", r"there is no folder \.\./models"),
        ("", "is not a model"),
        ("missing.safetensors", "no file missing.safetensors"),
        ("old.ckpt", "old.ckpt is a pickle.*convert"),
    ],
)
def test_what_is_no_model_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        find_model(name)


def test_a_folder_without_an_index_is_named(tmp_path):
    with pytest.raises(ConfigError, match=rf"{tmp_path} has no model_index\.json"):
        find_model(str(tmp_path))


# --- pickles ------------------------------------------------------------------------------------


@pytest.fixture
def pickled(folder, tmp_path):
    """The tiny pipeline with the UNet's weights in a pickle."""
    copied = shutil.copytree(folder, tmp_path / "pickled")
    weights = next((copied / "unet").glob("*.safetensors"))
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    return copied


def test_pickled_weights_are_refused_in_a_folder_as_in_a_file(pickled, tmp_path):
    checkpoint = tmp_path / "old.bin"
    checkpoint.touch()
    for path in (pickled, checkpoint):
        with pytest.raises(ConfigError, match=rf"is a pickle.*safetensors.*give pickle:{path} if"):
            find_model(str(path))


def test_pickles_beside_safetensors_are_not_read(folder, tmp_path):
    copied = shutil.copytree(folder, tmp_path / "both")
    (copied / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"nonsense")
    assert load_pipeline(find_model(str(copied)), torch.float32, CPU).unet is not None


def test_pickled_weights_are_read_when_they_are_asked_for(pickled, folder):
    from_pickle = load_pipeline(find_model(f"pickle:{pickled}"), torch.float32, CPU)
    dense = load_pipeline(find_model(str(folder)), torch.float32, CPU)
    for mine, other in zip(from_pickle.unet.parameters(), dense.unet.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_weights_of_the_hub_are_safetensors_unless_pickles_are_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(diffusers.DiffusionPipeline, "load_config", lambda location: {})
    monkeypatch.setattr(
        diffusers.DiffusionPipeline,
        "from_pretrained",
        lambda location, **arguments: (
            asked.append((location, arguments.get("use_safetensors"))) or diffusers.DiffusionPipeline()
        ),
    )
    for name in ("owner/name", "pickle:owner/name"):
        with pytest.raises(UnsupportedModelError):  # the stand-in has no denoiser
            load_pipeline(find_model(name), torch.float32, CPU)
    assert asked == [("owner/name", True), ("owner/name", None)]


def test_a_pickled_checkpoint_is_loaded_as_the_pipeline_of_its_architecture(tmp_path, monkeypatch):
    sdxl_only = "conditioner.embedders.1.model.transformer.resblocks.9.mlp.c_proj.bias"
    torch.save({"state_dict": {sdxl_only: torch.zeros(1)}}, tmp_path / "xl.ckpt")
    index = {"_class_name": "StableDiffusionXLPipeline"}
    monkeypatch.setattr(
        diffusers.DiffusionPipeline, "load_config", lambda pretrained_model_name_or_path: index
    )
    asked = []
    monkeypatch.setattr(
        diffusers.StableDiffusionXLPipeline,
        "from_single_file",
        lambda path, **arguments: asked.append(path) or diffusers.DiffusionPipeline(),
    )
    with pytest.raises(UnsupportedModelError):  # the stand-in has no denoiser
        load_pipeline(find_model(f"pickle:{tmp_path}/xl.ckpt"), torch.float32, CPU)
    assert asked == [f"{tmp_path}/xl.ckpt"]


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x80\x02\x8a\nl\xfc", b"PK\x03\x04cut off"])
def test_a_broken_pickle_is_one_line(pickled, tmp_path, content):
    checkpoint = tmp_path / "broken.ckpt"
    checkpoint.write_bytes(content)
    next((pickled / "unet").glob("*.bin")).write_bytes(content)
    for path in (pickled, checkpoint):
        with pytest.raises(ConfigError, match=f"cannot load {path}: ") as raised:
            load_pipeline(find_model(f"pickle:{path}"), torch.float32, CPU)
        assert "\n" not in str(raised.value)


def test_a_pickled_controlnet_is_refused_until_it_is_asked_for(folder, controlnet, tmp_path):
    copied = shutil.copytree(controlnet, tmp_path / "pickled-controlnet")
    weights = next(copied.glob("*.safetensors"))
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    model = find_model(str(folder))
    with pytest.raises(ConfigError, match=f"is a pickle.*pickle:{copied}"):
        load_pipeline(model, torch.float32, CPU, str(copied))
    assert load_pipeline(model, torch.float32, CPU, f"pickle:{copied}").controlnet is not None


# --- configs alone --------------------------------------------------------------------------------


def test_a_sketch_has_shapes_and_no_weights(folder):
    sketch = load_sketch(find_model(str(folder)))
    assert isinstance(sketch.denoiser, diffusers.UNet2DConditionModel)
    assert all(tensor.is_meta for tensor in sketch.denoiser.parameters())
    assert (sketch.scale, sketch.size) == (tiny_pipeline.SCALE, (tiny_pipeline.SIDE, tiny_pipeline.SIDE))


def test_a_sketch_needs_no_weights_on_disk(folder, tmp_path):
    copied = shutil.copytree(folder, tmp_path / "configs")
    for weights in copied.rglob("*.safetensors"):
        weights.unlink()
    assert load_sketch(find_model(str(copied))).scale == tiny_pipeline.SCALE


def change_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def with_codec(folder, tmp_path, codec):
    copied = shutil.copytree(folder, tmp_path / "changed")
    change_json(copied / "model_index.json", vae=["diffusers", type(codec).__name__])
    shutil.rmtree(copied / "vae")
    codec.save_config(copied / "vae")
    return find_model(str(copied))


def test_the_scale_comes_from_the_codec(folder, tmp_path):
    codec = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8,) * 3,
        decoder_block_out_channels=(8,) * 3,
        num_encoder_blocks=(1,) * 3,
        num_decoder_blocks=(1,) * 3,
    )
    assert load_sketch(with_codec(folder, tmp_path, codec)).scale == 4


def test_a_codec_may_name_its_scale(folder, tmp_path):
    codec = diffusers.AutoencoderKLWan(base_dim=4, num_res_blocks=1, scale_factor_spatial=16)
    assert load_sketch(with_codec(folder, tmp_path, codec)).scale == 16


# diffusers builds its audio codec with a function that torch deprecates.
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_a_codec_that_hides_its_scale_is_named(folder, tmp_path):
    codec = diffusers.AutoencoderOobleck(encoder_hidden_size=4, downsampling_ratios=[2], decoder_channels=4)
    with pytest.raises(UnsupportedModelError, match="AutoencoderOobleck does not say how many pixels"):
        load_sketch(with_codec(folder, tmp_path, codec))


def test_a_component_that_diffusers_does_not_have_is_named(folder, tmp_path):
    copied = shutil.copytree(folder, tmp_path / "changed")
    change_json(copied / "model_index.json", unet=["diffusers", "FutureModel"])
    with pytest.raises(UnsupportedModelError, match="has no class FutureModel"):
        load_sketch(find_model(str(copied)))


@pytest.mark.parametrize("entry", [["diffusers", "AutoencoderTypo"], ["diffusers", 5], "UNet", ["a"], 7, {}])
def test_an_index_with_a_wrong_entry_is_one_line(folder, tmp_path, entry):
    copied = shutil.copytree(folder, tmp_path / "changed")
    change_json(copied / "model_index.json", unet=entry)
    for load in (load_sketch, lambda source: load_pipeline(source, torch.float32, CPU)):
        with pytest.raises((ConfigError, UnsupportedModelError), match=r"^model: ") as raised:
            load(find_model(str(copied)))
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "content", ["[]", "[1, 2]", "5", "null", "[" * 100_000, '{"_class_name": "NoPipeline"}']
)
def test_an_index_that_is_none_is_one_line(folder, tmp_path, content):
    copied = shutil.copytree(folder, tmp_path / "changed")
    (copied / "model_index.json").write_text(content)
    for load in (load_sketch, lambda source: load_pipeline(source, torch.float32, CPU)):
        with pytest.raises((ConfigError, UnsupportedModelError), match=r"^model: ") as raised:
            load(find_model(str(copied)))
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("end", ["", ".safetensors", ".bin", "/x"])
@pytest.mark.parametrize("begin", ["", "pickle:", "~", "/"])
def test_a_very_long_name_is_one_short_line(begin, end):
    with pytest.raises(ConfigError) as raised:
        find_model(begin + "x" * 5000 + end)
    assert len(str(raised.value)) < 1000


def test_a_pipeline_without_a_denoiser_is_named(folder, tmp_path):
    copied = shutil.copytree(folder, tmp_path / "changed")
    change_json(copied / "model_index.json", unet=[None, None])
    with pytest.raises(UnsupportedModelError, match="StableDiffusionPipeline has neither a unet nor"):
        load_sketch(find_model(str(copied)))


def test_a_checkpoint_has_no_config_to_read(tmp_path):
    checkpoint = tmp_path / "sd.safetensors"
    checkpoint.touch()
    with pytest.raises(ConfigError, match=r"sd\.safetensors is a single checkpoint.*diffusers folder"):
        load_sketch(find_model(str(checkpoint)))


# --- weights --------------------------------------------------------------------------------------


def test_a_folder_loads_with_the_dtype_asked_for(folder):
    pipe = load_pipeline(find_model(str(folder)), torch.bfloat16, CPU)
    assert isinstance(pipe, diffusers.StableDiffusionPipeline)
    assert {tensor.dtype for tensor in pipe.unet.parameters()} == {torch.bfloat16}
    assert denoiser_name(pipe) == "unet"


def test_a_controlnet_joins_the_pipeline(folder, controlnet):
    pipe = load_pipeline(find_model(str(folder)), torch.float32, CPU, str(controlnet))
    assert isinstance(pipe, diffusers.StableDiffusionControlNetPipeline)
    assert isinstance(pipe.controlnet, diffusers.ControlNetModel)


def test_a_folder_that_cannot_be_read_is_one_line(folder, tmp_path):
    copied = shutil.copytree(folder, tmp_path / "broken")
    next((copied / "unet").glob("*.safetensors")).write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=f"cannot load {copied}: ") as raised:
        load_pipeline(find_model(str(copied)), torch.float32, CPU)
    assert "\n" not in str(raised.value)


def test_a_missing_controlnet_is_named(folder, tmp_path):
    with pytest.raises(ConfigError, match=f"cannot load {tmp_path}/none"):
        load_pipeline(find_model(str(folder)), torch.float32, CPU, f"{tmp_path}/none")


def test_a_checkpoint_is_loaded_as_the_pipeline_of_its_architecture(tmp_path, monkeypatch):
    # Tensor names and shapes by which diffusers recognises SDXL.
    checkpoint = tmp_path / "xl.safetensors"
    sdxl_only = "conditioner.embedders.1.model.transformer.resblocks.9.mlp.c_proj.bias"
    save_file({sdxl_only: torch.zeros(1)}, checkpoint)
    asked = []
    monkeypatch.setattr(
        diffusers.DiffusionPipeline,
        "load_config",
        lambda pretrained_model_name_or_path: (
            asked.append(pretrained_model_name_or_path) or {"_class_name": "StableDiffusionXLPipeline"}
        ),
    )
    monkeypatch.setattr(
        diffusers.StableDiffusionXLPipeline,
        "from_single_file",
        lambda path, **kwargs: asked.append((path, kwargs)) or diffusers.DiffusionPipeline(),
    )
    with pytest.raises(UnsupportedModelError):  # the stand-in has no denoiser
        load_pipeline(find_model(str(checkpoint)), torch.bfloat16, CPU)
    assert "stable-diffusion-xl" in asked[0]
    assert asked[1] == (str(checkpoint), {"dtype": torch.bfloat16})


def test_a_hub_model_that_cannot_be_reached_is_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="cannot reach the hub to load owner/no-such-model;") as raised:
        load_sketch(find_model("owner/no-such-model"))
    assert "\n" not in str(raised.value)


def test_without_diffusers_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(MissingExtraError, match=r'pip install "diffusers"'):
        load_sketch(find_model(str(folder)))


# --- device, dtype, scheduler, attention ----------------------------------------------------------


def test_auto_is_the_best_device_and_its_usual_dtype(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("cuda")
    assert resolve_dtype("auto", torch.device("cuda")) == torch.float16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("bf16", CPU) == torch.bfloat16


@pytest.mark.parametrize("name", ["gpu", "cpu:x", "cuda:99"])
def test_a_device_that_is_not_here_is_refused(name):
    with pytest.raises(ConfigError, match=f"device: cannot use '{name}'.*use auto, or a device"):
        resolve_device(name)


def test_dtypes_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="dtype: expected one of 'auto', 'fp32', 'fp16', 'bf16', got 'fp8'"):
        resolve_dtype("fp8", CPU)
    with pytest.raises(ConfigError, match=r"fp16 is slow .* on a CPU; use bf16"):
        resolve_dtype("fp16", CPU)


@pytest.mark.parametrize("name", sorted(set(SCHEDULER_NAMES) - {"flow-euler"}))
def test_each_short_name_gives_a_scheduler_that_sets_its_steps(pipe, name):
    set_scheduler(pipe, name)
    assert type(pipe.scheduler).__name__ == SCHEDULER_NAMES[name]
    assert pipe.scheduler.config.beta_schedule == "scaled_linear"  # the model's own, not the class's default
    pipe.scheduler.set_timesteps(5)
    assert len(pipe.scheduler.timesteps) <= 10


def test_dpm_plus_plus_and_plms_are_what_their_names_say(pipe):
    pipe.scheduler.register_to_config(algorithm_type="dpmsolver", skip_prk_steps=False)
    set_scheduler(pipe, "dpm++")
    assert pipe.scheduler.config.algorithm_type == "dpmsolver++"
    set_scheduler(pipe, "plms")
    assert pipe.scheduler.config.skip_prk_steps


@pytest.mark.parametrize("name", ["ddim", "ddpm", "lcm"])
def test_latents_are_not_clipped_unless_the_pipeline_says_so(pipe, name):
    """Schedulers that clip by default clip to the range of images, and latents have another one."""
    before, wanted = diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear"), SCHEDULER_NAMES[name]
    given = {"beta_schedule": "scaled_linear", "clip_sample": True}
    for present, has_latents in ((before, True), (before, False), (diffusers.DDPMScheduler(**given), True)):
        is_changed = has_latents and present is before
        pipe.scheduler, vae = present, pipe.vae
        pipe.vae = vae if has_latents else None
        set_scheduler(pipe, wanted)
        pipe.vae = vae
        default = inspect.signature(type(pipe.scheduler).__init__).parameters["clip_sample"].default
        expected = False if is_changed else present.config.get("clip_sample", default)
        assert pipe.scheduler.config.clip_sample is expected


def test_a_class_name_is_a_scheduler_name_too():
    assert scheduler_class_name("KDPM2DiscreteScheduler") == "KDPM2DiscreteScheduler"
    assert scheduler_class_name("DDIM") == "DDIMScheduler"


@pytest.mark.parametrize("name", ["quick", "UNet2DConditionModel", "SchedulerMixins"])
def test_an_unknown_scheduler_is_refused_with_those_known(name):
    with pytest.raises(ConfigError, match=f"scheduler: '{name}' is unknown.*ddim.*euler.*unipc"):
        scheduler_class_name(name)


def test_a_scheduler_for_another_kind_of_model_is_refused(pipe):
    before = pipe.scheduler
    with pytest.raises(ConfigError, match=r"FlowMatchEulerDiscreteScheduler does not fit.*DDIMScheduler"):
        set_scheduler(pipe, "flow-euler")
    assert pipe.scheduler is before


def test_attention_can_be_switched_both_ways(pipe):
    def processors():
        return {type(processor) for processor in pipe.unet.attn_processors.values()}

    set_attention([pipe.unet], "default")
    assert processors() == {AttnProcessor}
    set_attention([pipe.unet], "sdpa")
    assert processors() == {AttnProcessor2_0}


FLUX = FAMILIES["FluxTransformer2DModel"]


def test_attention_that_the_model_does_not_offer_is_refused(pipe, flash_is_here):
    flux = model_of(FLUX)
    set_attention([flux], "sdpa")
    with pytest.raises(ConfigError, match=r"FluxTransformer2DModel computes attention in .*; use sdpa"):
        set_attention([flux], "default")
    with pytest.raises(
        ConfigError, match=r"UNet2DConditionModel .* support no back-end of diffusers, got 'flash'"
    ):
        set_attention([pipe.unet], "flash")


@pytest.fixture
def flash_is_here(monkeypatch):
    """The calls of a stand-in for FlashAttention, as if its package were installed."""
    calls = []

    def flash(*args, **kwargs):
        calls.append(kwargs)
        return kernels.flash(*args, **kwargs)

    name, table = AttentionBackendName.FLASH, kernels.REGISTRY
    monkeypatch.setattr(attention_dispatch, "_CAN_USE_FLASH_ATTN", True)
    monkeypatch.setitem(table._backends, name, flash)
    monkeypatch.setitem(table._supported_arg_names, name, set(inspect.signature(kernels.flash).parameters))
    return calls


def test_a_back_end_of_diffusers_is_that_of_one_model_alone(flash_is_here):
    active, (one, other) = kernels.REGISTRY._active_backend, [model_of(FLUX) for _ in range(2)]
    expected = call(one, FLUX.inputs(1, 8, 8))
    set_attention([one], "flash")
    assert kernels.REGISTRY._active_backend == active
    call(other, FLUX.inputs(1, 8, 8))
    assert not flash_is_here
    # The kernels sum in different orders.
    assert_close(call(one, FLUX.inputs(1, 8, 8)), expected, rtol=1e-4, atol=1e-5)
    assert len(flash_is_here) == len(one.transformer_blocks) + len(one.single_transformer_blocks)
    set_attention([one], "sdpa")
    flash_is_here.clear()
    assert torch.equal(call(one, FLUX.inputs(1, 8, 8)), expected)
    assert not flash_is_here


def test_operations_are_counted_as_with_pytorchs_attention(flash_is_here):
    """Operations are counted on the meta device, which other kernels do not support."""
    model = model_of(FLUX)
    expected = predict(model, ToMeConfig(ratio=0.5, max_downsample=8), 16, 16)
    set_attention([model], "flash")
    counted = predict(model, ToMeConfig(ratio=0.5, max_downsample=8), 16, 16)
    assert not flash_is_here
    assert (counted.flops_dense, counted.flops_merged) == (expected.flops_dense, expected.flops_merged)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flush", "expected one of 'sdpa', 'xformers', 'default', .*'flash'.*, got 'flush'"),
        ("sage", r"cannot use 'sage' \(.*sageattention.*\); install what it needs, or use sdpa"),
        ("xformers", "pip install xformers"),
    ],
)
def test_attention_that_is_not_here_is_refused(pipe, name, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "xformers", None)
    with pytest.raises(ConfigError, match=message):
        set_attention([pipe.unet], name)


def test_parts_that_were_saved_as_absent_need_not_be_named(tmp_path):
    """Stable Diffusion 3 without T5: diffusers requires the encoder unless it is passed as None."""
    without = {"text_encoder_3": None, "tokenizer_3": None}
    diffusers.StableDiffusion3Pipeline.from_pretrained(demo.path("emoji-mmdit"), **without).save_pretrained(
        tmp_path
    )
    pipe = load_pipeline(find_model(str(tmp_path)), torch.float32, CPU)
    assert pipe.text_encoder_3 is None
    assert pipe.text_encoder_2 is not None


def _without_scheduler(model):
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps(index | {"scheduler": [None, None]}))


def _size_in_words(model):
    config = json.loads((model / "unet" / "config.json").read_text())
    (model / "unet" / "config.json").write_text(json.dumps(config | {"sample_size": "big"}))


def _weights_of_another(model):
    (other,) = (model / "vae").glob("*.safetensors")
    (weights,) = (model / "unet").glob("*.safetensors")
    shutil.copy(other, weights)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_scheduler, "has no scheduler"),
        (_size_in_words, "sample_size"),
        (_weights_of_another, "cannot load"),
        (lambda model: shutil.rmtree(model / "tokenizer"), "cannot draw, without merging too"),
    ],
)
def test_a_damaged_folder_is_one_line(folder, tmp_path, capsys, damage, message):
    model = shutil.copytree(folder, tmp_path / "model")
    damage(model)
    command = ["generate", "a cat", "--model", str(model), "--size", "64", "--steps", "2"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tokenmerge: model: ")]
    assert len(said) == 1
    assert message in said[0]


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("`height` has to be divisible by 8 but is 100", r"size: object cannot draw it \(`height` has to be"),
        ("no tokenizer", "model: object cannot draw, without merging too: no tokenizer; check the files"),
    ],
)
def test_an_error_of_the_pipeline_says_what_to_change(reason, message):
    def call(pipe, on_step):
        raise ValueError(reason)

    with pytest.raises(ConfigError, match=message):
        Studio(object()).draw("dense", call)
