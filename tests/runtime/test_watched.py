"""Other people's code that looks into a model sees every step and every token, or its user is told."""

from __future__ import annotations

import ast
import warnings
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import cached
import diffusers
import hosts
import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPAGPipeline, StableDiffusionSAGPipeline
from diffusers.models import attention_processor
from diffusers.models.attention_processor import AttnProcessor2_0
from PIL import Image
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES
from tiny_pipeline import UNET
from torch import nn

import tokenmerge.default_method
from tokenmerge import StepReuse, ToMeConfig, UnsupportedModelError, apply_token_merging, token_merging
from tokenmerge.plans.generation import StepKind
from tokenmerge.report import predict
from tokenmerge.runtime.memory.state import BlockState, LayerState
from tokenmerge.runtime.patching.patch import state_of
from tokenmerge.runtime.patching.watched import watchers_in

STEPS, SIDE = 12, 32
REUSED = ToMeConfig(ratio=0, reuse=StepReuse(every=2))
MID = "mid_block.attentions.0.transformer_blocks.0"
LAST = "up_blocks.1.attentions.0.transformer_blocks.0"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*has been deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning"),  # schedulers
]


class Controller:
    """Counts the calls of all layers, as prompt-to-prompt does to know the step."""

    def __init__(self, layers: int) -> None:
        self.layers, self.calls, self.tokens = layers, 0, set[int]()

    def __call__(self, attn: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.tokens.add(hidden_states.shape[1])
        return AttnProcessor2_0()(attn, hidden_states, *args, **kwargs)

    @property
    def steps(self) -> float:
        return self.calls / self.layers


def control(model: Any, where: str = "") -> Controller:
    """One processor shared by all layers, or by those whose path contains ``where``."""
    chosen = [name for name in model.attn_processors if where in name]
    shared = Controller(len(chosen))
    model.set_attn_processor({**model.attn_processors, **dict.fromkeys(chosen, shared)})
    return shared


def draw(pipe: Any, **arguments: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    given = {"num_inference_steps": STEPS, "output_type": "latent", "generator": generator, **arguments}
    return pipe("a cat", height=SIDE, width=SIDE, **given).images


def merging(root: nn.Module) -> set[str]:
    """Paths of the blocks and layers that merge in the generation that ran last."""
    return {part.path for part, cache in cached.caches(root, BlockState | LayerState) if not cache.dense}


def left_alone() -> Any:
    return pytest.warns(UserWarning, match="runs in every step, on all tokens, so .* time is saved")


@pytest.mark.parametrize("speedup", [1.3, 2.0, 3.0])
@pytest.mark.parametrize("patched_first", [True, False])
def test_a_controller_counts_every_step(pipe, speedup, patched_first):
    control(pipe.unet)
    dense = draw(pipe)
    pipe.unet.set_attn_processor(AttnProcessor2_0())
    if patched_first:
        patch = apply_token_merging(pipe, speedup=speedup)
        draw(pipe)
    controller = control(pipe.unet)
    with left_alone() as said:
        if not patched_first:
            patch = apply_token_merging(pipe, speedup=speedup)
        pictures = [draw(pipe), draw(pipe)]
    assert len(said) == 1
    assert controller.steps == 2 * STEPS
    assert all(torch.equal(picture, dense) for picture in pictures)
    assert str(patch).count("left alone: what Controller at ") == 1
    assert "12 steps" in str(patch)
    assert "\n  warning: " not in str(patch)  # its images are the dense ones
    assert state_of(pipe.unet).last_run.kinds == {StepKind.FULL: 12}
    assert not state_of(pipe.unet).last_run.merging_steps
    assert "0.0 % of the operations saved" in str(patch)
    assert controller.steps == 2 * STEPS  # no report has called it


def test_without_it_the_same_patch_is_as_before(pipe):
    apply_token_merging(pipe, speedup=2.0)
    before = draw(pipe)
    control(pipe.unet)
    with left_alone():
        draw(pipe)
    pipe.unet.set_attn_processor(AttnProcessor2_0())
    assert torch.equal(draw(pipe), before)
    assert state_of(pipe.unet).left_alone.note == ""


def test_a_plain_pipeline_has_none(pipe):
    patch = apply_token_merging(pipe, speedup=2.0)
    draw(pipe)
    assert watchers_in(pipe.unet) == {}
    assert "left alone" not in str(patch)
    assert not any(cache.dense for _, cache in cached.caches(pipe.unet, BlockState | LayerState))


def test_maps_of_cross_attention_leave_self_attention_merging(pipe):
    apply_token_merging(pipe, speedup=2.0)
    controller = control(pipe.unet, "attn2")
    with left_alone():
        draw(pipe)
    assert controller.steps == STEPS
    assert any(path.endswith("attn1") for path in merging(pipe.unet))
    assert state_of(pipe.unet).last_run.kinds == {StepKind.FULL: STEPS}
    assert state_of(pipe.unet).last_run.merging_steps == {*range(STEPS)}


def test_an_attention_map_read_by_a_hook_is_of_all_tokens_in_each_step(pipe):
    """All other blocks merge."""
    patch = apply_token_merging(pipe, speedup=2.0)
    seen: list[Any] = []
    hook = pipe.unet.get_submodule(MID).attn1.register_forward_hook(lambda *given: seen.append(given[-1]))
    with left_alone(), patch.record() as plans:
        draw(pipe)
    assert [tuple(result.shape[:2]) for result in seen] == [(2, 64)] * STEPS
    assert MID not in plans
    assert LAST in plans
    report = patch.report()
    assert MID not in {row.path for row in report.rows}
    assert report.rows
    assert report.flops_merged < report.flops_dense
    hook.remove()
    with patch.record() as plans:
        draw(pipe)
    assert MID in plans


def test_a_hook_at_the_finest_level_lets_deep_stages_be_skipped(pipe):
    config = tokenmerge.default_method.settings_for(pipe, guidance=3.0)
    assert config.reuse.skips_finest
    apply_token_merging(pipe, speedup=2.0)
    ran: dict[str, int] = {"down_blocks.0.resnets.0.conv1": 0, "mid_block.resnets.0.conv1": 0}

    def count(path: str, *_: Any) -> None:
        ran[path] += 1

    shallow, deep = ran
    pipe.unet.get_submodule(shallow).register_forward_hook(partial(count, shallow))
    with left_alone():
        draw(pipe, guidance_scale=3.0)
    assert ran[shallow] == STEPS
    assert StepKind.SHALLOW in state_of(pipe.unet).last_run.kinds
    pipe.unet.get_submodule(deep).register_forward_pre_hook(partial(count, deep))
    with left_alone():
        draw(pipe, guidance_scale=3.0)
    assert ran == {shallow: 2 * STEPS, deep: STEPS}


@pytest.mark.parametrize("method", ["class", "function", "method"])
def test_a_replaced_forward_runs_in_every_step(pipe, method):
    """As MasaCtrl and the first prompt-to-prompt put it on attention."""
    apply_token_merging(pipe, speedup=2.0)
    attention, calls = pipe.unet.get_submodule(MID).attn2, []
    plain = attention.forward

    def seeing(hidden_states: Any, **kwargs: Any) -> Any:
        calls.append(hidden_states.shape[1])
        return plain(hidden_states, **kwargs)

    def bound(self: Any, hidden_states: Any, **kwargs: Any) -> Any:
        return seeing(hidden_states, **kwargs)

    class Seeing:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return seeing(*args, **kwargs)

    kinds = {"class": Seeing(), "function": seeing, "method": MethodType(bound, attention)}
    attention.forward = kinds[method]
    with left_alone():
        draw(pipe)
    assert calls == [64] * STEPS


def guided_by_attention(pipe: Any) -> Any:
    parts = {**pipe.components, "scheduler": DDIMScheduler.from_config(pipe.scheduler.config)}
    guided = StableDiffusionSAGPipeline(**parts, requires_safety_checker=False)
    guided.set_progress_bar_config(disable=True)
    return guided


@pytest.mark.parametrize("speedup", [1.3, 2.0])
def test_self_attention_guidance_runs(pipe, speedup):
    """It puts a processor on the attention in the middle when it is called."""
    guided = guided_by_attention(pipe)
    apply_token_merging(guided, speedup=speedup)
    with pytest.warns(UserWarning, match=f"what CrossAttnStoreProcessor at {MID}.attn1 looks at"):
        picture = draw(guided, sag_scale=0.75)
    assert torch.isfinite(picture).all()
    assert f"{MID}.attn1" not in merging(pipe.unet)
    assert f"{LAST}.attn1" in merging(pipe.unet)


@pytest.mark.parametrize("config", [REUSED, ToMeConfig(ratio=0.5, max_downsample=2)])
def test_what_self_attention_guidance_reads_is_not_left_out(pipe, config):
    guided = guided_by_attention(pipe)
    patch = apply_token_merging(guided, config)
    for _ in range(2):
        with pytest.raises(
            UnsupportedModelError, match="reads what CrossAttnStoreProcessor keeps of each token of mid_block"
        ):
            draw(guided, sag_scale=0.75)
    patch.remove()
    assert state_of(pipe.unet) is None
    pipe.unet.get_submodule(MID).attn1.processor = guided.unet.get_submodule(LAST).attn1.processor
    with token_merging(guided, ToMeConfig(ratio=0.5)):  # the finest level alone
        draw(guided, sag_scale=0.75)


def test_settings_that_cannot_work_leave_the_earlier_ones(pipe):
    from diffusers.pipelines.deprecated.stable_diffusion_sag.pipeline_stable_diffusion_sag import (
        CrossAttnStoreProcessor,
    )

    apply_token_merging(pipe, ToMeConfig(ratio=0.5))
    before = state_of(pipe.unet)
    guided = guided_by_attention(pipe)
    guided.unet.get_submodule(MID).attn1.processor = CrossAttnStoreProcessor()
    with pytest.raises(UnsupportedModelError, match="CrossAttnStoreProcessor keeps"):
        apply_token_merging(guided, REUSED)
    assert state_of(pipe.unet) is before


# Inversion draws the noise of each step anew.
@pytest.mark.filterwarnings("ignore:.*called with a sample that does not follow from one of the step before")
def test_ledits_reads_its_maps(pipe):
    from diffusers import LEditsPPPipelineStableDiffusion

    scheduler = diffusers.DPMSolverMultistepScheduler.from_config(
        pipe.scheduler.config, algorithm_type="sde-dpmsolver++", solver_order=2
    )
    parts = {name: part for name, part in pipe.components.items() if name != "image_encoder"}
    torch.manual_seed(0)
    three = {"block_out_channels": (16, 32, 32), "up_block_types": ("CrossAttnUpBlock2D",) * 3}
    three |= {"down_block_types": ("CrossAttnDownBlock2D",) * 3}  # it reads maps at level 4
    parts["unet"] = diffusers.UNet2DConditionModel(**{**UNET, **three})
    editing = LEditsPPPipelineStableDiffusion(
        **{**parts, "scheduler": scheduler}, requires_safety_checker=False
    )
    editing.set_progress_bar_config(disable=True)
    picture = Image.effect_noise((64, 64), 80).convert("RGB")

    def edit() -> Any:
        generator = torch.Generator().manual_seed(0)
        editing.invert(image=picture, num_inversion_steps=8, skip=0.1, generator=generator)
        return editing(
            editing_prompt=["dog"], edit_threshold=0.75, use_cross_attn_mask=True, output_type="latent"
        ).images

    apply_token_merging(editing, REUSED)
    with pytest.raises(UnsupportedModelError, match="reads what LEDITSCrossAttnProcessor keeps"):
        edit()
    with pytest.raises(UnsupportedModelError, match="reads what LEDITSCrossAttnProcessor keeps"):
        apply_token_merging(editing, REUSED)  # the pipeline leaves its processors where they are
    with pytest.warns(UserWarning, match="LEDITSCrossAttnProcessor at .* may not see every step"):
        apply_token_merging(editing.unet, REUSED)  # others do not read them
    with pytest.warns(UserWarning, match="what LEDITSCrossAttnProcessor at .* looks at runs in every step"):
        apply_token_merging(editing, speedup=2.0)
    assert torch.isfinite(edit()).all()


def test_settings_of_ones_own_warn_once(pipe):
    controller = control(pipe.unet)
    config = ToMeConfig(ratio=0.5, max_downsample=2, reuse=StepReuse(every=2))
    told = r"Controller at .* and 13 other modules may not see every token and every step \(reuse.every=2\)"
    with pytest.warns(UserWarning, match=told):
        apply_token_merging(pipe, config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(pipe)
        draw(pipe)
    assert controller.steps < 2 * STEPS


def test_nothing_is_said_of_what_settings_leave_as_it_is(pipe):
    control(pipe.unet, "attn2")
    pipe.unet.conv_in.register_forward_hook(lambda *_: None)
    pipe.unet.register_forward_hook(lambda *_: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_token_merging(pipe, ToMeConfig(ratio=0.5, max_downsample=2))  # merges self-attention
        draw(pipe)
        apply_token_merging(pipe, speedup=1)
        draw(pipe)


def test_settings_that_follow_no_steps_notice_it_as_a_generation_begins(pipe):
    apply_token_merging(pipe, ToMeConfig(ratio=0.5))
    draw(pipe)
    control(pipe.unet)
    with pytest.warns(UserWarning, match="Controller at .* may not see every token;"):
        draw(pipe)


def test_a_model_alone_notices_the_pipeline_that_runs(pipe):
    apply_token_merging(pipe.unet, speedup=2.0)
    draw(pipe)
    control(pipe.unet)
    dense = draw_without(pipe)
    with left_alone():
        assert torch.equal(draw(pipe), dense)


def draw_without(pipe: Any) -> Any:
    """An image of the unpatched pipeline."""
    copied = type(pipe)(**{**pipe.components, "unet": hosts_copy(pipe.unet)}, requires_safety_checker=False)
    copied.set_progress_bar_config(disable=True)
    return draw(copied)


def hosts_copy(unet: Any) -> Any:
    copied = diffusers.UNet2DConditionModel.from_config(unet.config).eval()
    copied.load_state_dict(unet.state_dict())
    return copied


@pytest.mark.parametrize("where", ["attn", "", "all"])
@pytest.mark.parametrize("speedup", [2.0, 3.0])
def test_blocks_of_a_transformer(where, speedup):
    """A controller on attention, and a hook on whole blocks, as ControlNets of users read them."""
    family = FAMILIES["FluxTransformer2DModel"]
    model, arguments = model_of(family), family.inputs(1, 8, 8)
    dense = call(model, arguments)
    pipe = SimpleNamespace(transformer=model, scheduler=SimpleNamespace(timesteps=None))
    patch = apply_token_merging(pipe, speedup=speedup)
    seen = []
    block = model.transformer_blocks[-1]
    (block.attn if where == "attn" else block).register_forward_hook(lambda *given: seen.append(given[-1]))
    for other in [*model.transformer_blocks[:-1], *model.single_transformer_blocks] if where == "all" else ():
        other.register_forward_hook(lambda *_: None)
    results = []
    with left_alone():
        for index in range(8):
            patch.at_step(index, 8)
            results.append(call(model, arguments))
    assert len(seen) == 8
    assert all(result[1].shape[1] == 64 or result[0].shape[1] == 64 for result in seen)
    assert state_of(model).last_run.kinds[StepKind.SHALLOW] == 0
    others = [row.path for row in patch.report(8, 8, batch=1).rows]
    assert "transformer_blocks.1" not in others
    assert bool(others) == (where != "all")
    assert all(torch.equal(result, dense) for result in results) == (where == "all")


def test_processors_and_hooks_that_only_compute(pipe):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    from peft import LoraConfig

    unet = pipe.unet
    mine = [
        attention_processor.AttnProcessor(),
        AttnProcessor2_0(),
        attention_processor.FusedAttnProcessor2_0(),
        attention_processor.SlicedAttnProcessor(2),
        attention_processor.XFormersAttnProcessor(),
        attention_processor.PAGCFGIdentitySelfAttnProcessor2_0(),
        attention_processor.IPAdapterAttnProcessor2_0(16, 16, num_tokens=(2,)),
    ]
    for processor in mine:
        unet.get_submodule(MID).attn2.set_processor(processor)
        assert watchers_in(unet) == {}
    unet.set_attn_processor(AttnProcessor2_0())
    unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k"]))
    add_hook_to_module(unet.get_submodule(MID).attn1, AlignDevicesHook(io_same_device=True))
    torch.nn.utils.parametrizations.spectral_norm(unet.get_submodule(LAST).attn1.to_v)
    unet.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    assert watchers_in(unet) == {}


def test_perturbed_attention_guidance_is_as_before(pipe):
    guided = StableDiffusionPAGPipeline.from_pipe(pipe, pag_applied_layers=["mid"])
    guided.set_progress_bar_config(disable=True)
    patch = apply_token_merging(guided, speedup=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(guided, pag_scale=3.0)
    assert state_of(pipe.unet).last_run.kinds[StepKind.SHALLOW]
    assert "left alone" not in str(patch)


def test_every_processor_of_a_pipeline_of_diffusers_is_known():
    """Those that keep what they see are in the table; the others are listed here."""
    compute = {"CrossFrameAttnProcessor", "CrossFrameAttnProcessor2_0", "LTX2DurationAttnProcessor"}
    found = set()
    for file in (Path(diffusers.__file__).parent / "pipelines").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text if "Processor" in text else "")):
            if isinstance(node, ast.ClassDef) and "Processor" in node.name:
                calls = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__call__"]
                if any("attn" in [argument.arg for argument in f.args.args] for f in calls):
                    found.add(node.name)
    from tokenmerge.runtime.patching.watched import _STORES

    assert found - compute == _STORES.keys()


def test_counting_calls_no_processor_of_others():
    unet = hosts.unet()
    plain = predict(unet, ToMeConfig(ratio=0.5))

    def processor(attn: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("called")

    for block in ("down_blocks.0.attentions.0", LAST.rpartition(".transformer")[0]):
        unet.get_submodule(block).transformer_blocks[0].attn1.set_processor(processor)
    assert predict(unet, ToMeConfig(ratio=0.5)) == plain


def test_a_file_of_settings_is_none_of_the_default_method(pipe, tmp_path):
    from tokenmerge.config import save_config
    from tokenmerge.config.origin import is_default

    file = tmp_path / "auto-tuned.json"
    save_config(ToMeConfig(ratio=0.5), file)
    apply_token_merging(pipe, str(file))
    assert not is_default(state_of(pipe.unet).method)
    apply_token_merging(pipe, speedup=2.0)
    assert is_default(state_of(pipe.unet).method)
