"""Token merging in ComfyUI's transformers: the models are called as its samplers call them."""

from __future__ import annotations

import comfy_hosts as hosts  # first: it brings ComfyUI's code

import comfy.ops  # isort: skip
import pytest
import torch
from comfy.controlnet import ControlBase
from comfy.ldm.flux.model import Flux
from comfy.ldm.hunyuan_video.model import HunyuanVideo
from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel
from comfy.ldm.wan.model import WanModel

from tokenmerge import Correction, MergeSharing, StepReuse, ToMeConfig
from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge.integrations.comfyui import sampling, transformer
from tokenmerge.integrations.comfyui import settings as node_settings
from tokenmerge.integrations.comfyui.models import find_target
from tokenmerge.integrations.comfyui.nodes import TokenMerging
from tokenmerge.integrations.comfyui.patch import patched
from tokenmerge.integrations.comfyui.sampling import KEY, Sampling
from tokenmerge.integrations.comfyui.settings import Asked, Settings, settings_for
from tokenmerge.integrations.comfyui.transformer import finish_run
from tokenmerge.plans import pays_from
from tokenmerge.plans.generation import StepKind, plan_generation
from tokenmerge.runtime.blocks.merged_call import merged_tokens

MAKE = {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.disable_weight_init}
PAIR = {"hidden_size": 32, "mlp_ratio": 2.0, "num_heads": 2, "depth": 2, "depth_single_blocks": 2}
AXES = {"axes_dim": [4, 6, 6], "theta": 256, "qkv_bias": True, "guidance_embed": False}


def flux():
    return Flux(
        image_model="flux", in_channels=4, out_channels=4, vec_in_dim=12, context_in_dim=24, patch_size=2,
        **PAIR, **AXES, **MAKE,
    )  # fmt: skip


def sd3(depth=2):
    made = OpenAISignatureMMDITWrapper(
        input_size=None, patch_size=2, in_channels=4, depth=depth, adm_in_channels=12,
        context_embedder_config={
            "target": "torch.nn.Linear", "params": {"in_features": 24, "out_features": 64 * depth},
        },
        pos_embed_max_size=16, num_patches=256, pos_embed_scaling_factor=None, qkv_bias=True, **MAKE,
    )  # fmt: skip
    made.pos_embed.normal_(generator=torch.Generator().manual_seed(1))
    return made


def qwen():
    return QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=24, pooled_projection_dim=24,
        axes_dims_rope=(4, 6, 6), **MAKE,
    )  # fmt: skip


def wan():
    return WanModel(
        model_type="t2v", in_dim=4, dim=32, ffn_dim=64, freq_dim=32, text_dim=24, out_dim=4, num_heads=2,
        num_layers=2, **MAKE,
    )  # fmt: skip


def hunyuan():
    return HunyuanVideo(
        image_model="hunyuan_video", in_channels=4, out_channels=4, vec_in_dim=12, context_in_dim=24,
        patch_size=[1, 2, 2], byt5=False, meanflow=False,
        use_cond_type_embedding=False, vision_in_dim=None, **PAIR, **AXES, **MAKE,
    )  # fmt: skip


IMAGE, VIDEO = (2, 4, 16, 12), (2, 4, 2, 16, 12)
MODELS = {
    "flux": (flux, IMAGE, {"y": torch.ones(2, 12)}),
    "sd3": (sd3, IMAGE, {"y": torch.ones(2, 12)}),
    "qwen": (qwen, (*VIDEO[:2], 1, 16, 12), {}),
    "wan": (wan, VIDEO, {}),
    "hunyuan": (hunyuan, VIDEO, {"y": torch.ones(2, 12), "guidance": None}),
}


class Patcher:
    """What the code reads of a ``ModelPatcher``, which is real, around a model that is built here."""

    def __new__(cls, root):
        model = torch.nn.Module()
        model.diffusion_model = hosts.seeded(root)
        return hosts.comfy.model_patcher.ModelPatcher(model, hosts.CPU, hosts.CPU)


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    make, shape, more = MODELS[request.param]
    return request.param, Patcher(make()), shape, more


def call(patcher, shape, more, settings=None, seed=0, **named):
    generator = torch.Generator().manual_seed(seed)
    x, text = torch.randn(shape, generator=generator), torch.randn(2, 7, 24, generator=generator)
    options = patcher.model_options["transformer_options"]
    times = torch.full((2,), 0.5)
    if settings is not None:
        sampling = Sampling(settings)
        sampling.begin_step(0.5, times, shape, True)
        sampling.begin_call(shape, {"cond_or_uncond": [1, 0]})
        options = {**options, KEY: sampling}
    with torch.inference_mode():
        return patcher.model.diffusion_model(
            x, times, context=text, transformer_options=dict(options), **more, **named
        )


def settings_of(patcher, **config):
    return Settings(ToMeConfig(scope="block", **config), find_target(patcher))


def test_ratio_0_is_identity_and_the_model_stays_as_it_is(case):
    _, model, shape, more = case
    dense, before = call(model, shape, more), repr(model.model_options)
    assert dense.isfinite().all()
    settings = settings_of(model, ratio=0.0)
    assert torch.equal(call(patched(model, settings), shape, more, settings), dense)
    merged = settings_of(model, ratio=0.5, proportional=True)
    assert not torch.equal(call(patched(model, merged), shape, more, merged), dense)
    assert repr(model.model_options) == before
    assert torch.equal(call(model, shape, more), dense)


def test_blocks_run_on_half_of_the_tokens(case):
    name, model, shape, more = case
    settings = settings_of(model, ratio=0.5)
    clone, seen = patched(model, settings), []
    hooks = [
        block.module.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(numbers(args, kwargs)), with_kwargs=True
        )
        for block in settings.target.blocks
    ]
    call(model, shape, more)
    dense, seen[:] = list(seen), []
    call(clone, shape, more, settings)
    for hook in hooks:
        hook.remove()
    n = 48 * (shape[2] if len(shape) == 5 else 1)
    assert [a - b for a, b in zip(dense, seen, strict=True)] == [n // 2] * len(dense), name


def numbers(args, kwargs):
    """Number of tokens in the longest sequence that a block gets."""
    values = [*args, *(kwargs[key] for key in ("img", "hidden_states", "x") if key in kwargs)]
    return max(value.shape[1] for value in values if isinstance(value, torch.Tensor) and value.ndim == 3)


def test_a_batch_of_two_prompts_shares_its_plans(case, monkeypatch):
    _, model, shape, more = case
    made, tome = [], sampling.PLANNERS["tome"]
    monkeypatch.setitem(sampling.PLANNERS, "tome", lambda f, *a: made.append(len(f)) or tome(f, *a))
    settings = settings_of(model, ratio=0.5)
    call(patched(model, settings), shape, more, settings)
    assert made == [1] * len(settings.target.blocks)


STACK = {"planner": "tiled", "features": "model_residual", "merge_sharing": MergeSharing(blocks=True)}


# Without a correction, tokens of a group change alike, so rounding would sort what the planner compares.
@pytest.mark.parametrize(
    "more", [{"features": "input"}, {"correction": Correction(every=3)}], ids=["merging", "corrected"]
)
def test_a_stack_equals_merging_block_by_block(case, more, monkeypatch):
    """Also where a ControlNet adds something between blocks. Merging happens once for each stack."""
    name, model, shape, arguments = case
    settings = settings_of(model, ratio=0.5, proportional=True, **{**STACK, **more})
    merged = []
    monkeypatch.setattr(
        transformer, "merged_tokens", lambda *given: merged.append(1) or merged_tokens(*given)
    )
    stacks = {"flux": 2, "hunyuan": 2}.get(name, 1)  # single-stream blocks begin with text and image joined
    controls = [{}]
    if name in ("flux", "sd3"):
        draw, width = torch.Generator().manual_seed(0), 128 if name == "sd3" else 32
        controls.append({"control": {"output": [torch.randn(2, 48, width, generator=draw)] * 2}})
        if name == "flux":
            controls[1]["control"]["input"] = controls[1]["control"]["output"]
    for named in controls:
        merged.clear()
        once = steps_of(model, settings, shape, {**arguments, **named})
        if not named:
            assert len(merged) == stacks * (
                2 if "correction" in more else 3
            )  # a correction measures in the first step
        with monkeypatch.context() as patch:
            patch.setattr(transformer.Stack, "may_go_on", False)
            each = steps_of(model, settings, shape, {**arguments, **named})
        for one, other in zip(once, each, strict=True):
            # 100 dB: float32 over these networks errs by 1e-6 of the largest value.
            assert torch.allclose(one, other, atol=1e-5 * float(other.abs().max()))


def steps_of(model, settings, shape, more, steps=3):
    """The results of some steps of a sampling, with a sample that changes."""
    return results_of(patched(model, settings), settings, shape, more, [i / 8 for i in range(steps)])


def results_of(clone, settings, shape, more, places):
    """The results of steps with samples at some places between two random ones."""
    sampling = Sampling(settings, [1 - i / 8 for i in range(9)])
    draw = torch.Generator().manual_seed(0)
    start, end = torch.randn(2, *shape, generator=draw)
    text, results = torch.randn(2, 7, 24, generator=draw), []
    with torch.inference_mode():
        for i, place in enumerate(places):
            times = torch.full((2,), 0.5)
            sampling.begin_step(1 - i / 8, times, shape, True)
            sampling.begin_call(shape, {"cond_or_uncond": [1, 0]})
            options = {**clone.model_options["transformer_options"], KEY: sampling}
            x = torch.lerp(start, end, place)
            network = clone.model.diffusion_model
            results.append(network(x, times, context=text, transformer_options=options, **more))
            finish_run(sampling)
            sampling.end_call(results[-1])
    return results


def compared_by_plans(order, scale, monkeypatch, **config):
    """What the plans of 3 steps compare, with the prompts in this order in the batch."""
    model, more = Patcher(sd3()), {"y": torch.ones(2, 12)}
    settings = settings_of(
        model, ratio=0.5, planner="tiled", features="model_residual", correction=Correction(every=8), **config
    )
    clone, found, plan = patched(model, settings), [], Sampling._plan
    monkeypatch.setattr(
        Sampling, "_plan", lambda self, features, *rest: found.append(features) or plan(self, features, *rest)
    )
    sampling = Sampling(settings, [1 - i / 8 for i in range(9)], scale)
    draw = torch.Generator().manual_seed(0)
    start, end = torch.randn(2, 1, *IMAGE[1:], generator=draw)
    text = torch.randn(2, 7, 24, generator=draw)[order]
    with torch.inference_mode():
        for i in range(3):
            sampling.begin_step(1 - i / 8, torch.full((2,), 0.5), IMAGE, True)
            sampling.begin_call(IMAGE, {"cond_or_uncond": order})
            options = {**clone.model_options["transformer_options"], KEY: sampling}
            x = torch.lerp(start, end, i / 8).repeat(2, 1, 1, 1)
            result = clone.model.diffusion_model(
                x, torch.full((2,), 0.5), context=text, transformer_options=options, **more
            )
            finish_run(sampling)
            sampling.end_call(result)
    monkeypatch.undo()
    return found


def test_of_what_was_added_for_both_prompts_what_guidance_makes_is_compared(monkeypatch):
    """In whichever order they stand in the batch. Without a scale, their mean similarity counts."""
    sharing = {"merge_sharing": MergeSharing(blocks=True)}
    means = compared_by_plans([1, 0], None, monkeypatch, **sharing)
    found = compared_by_plans([1, 0], 4.0, monkeypatch, **sharing)
    assert [features.shape[2] for features in found] == [means[0].shape[2] // 2] * len(found)
    for one, other in zip(found, compared_by_plans([0, 1], 4.0, monkeypatch, **sharing), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    turned = compared_by_plans([1, 0], 30.0, monkeypatch, **sharing)
    assert not torch.allclose(turned[0], found[0], rtol=1e-2)


def test_a_block_changes_its_tokens_by_what_it_changes_of_the_merged_ones():
    """x + U (f (M x) − M x), by hand, with positions of the tokens that stay."""
    model, more = Patcher(flux()), {"y": torch.ones(2, 12)}
    settings, given = settings_of(model, ratio=0.5, planner="uniform"), []
    clone, block = patched(model, settings), model.model.diffusion_model.double_blocks[0]
    replaced = clone.model_options["transformer_options"]["patches_replace"]["dit"]["double_block", 0]

    def noted(arguments, extra):
        inputs = {**arguments, "img": arguments["img"].clone(), "txt": arguments["txt"].clone()}
        given.append((inputs, replaced(arguments, extra)))
        return given[-1][1]

    clone.set_model_patch_replace(noted, "dit", "double_block", 0)
    call(clone, IMAGE, more, settings)
    (inputs, result), running = given[0], given[0][0]["transformer_options"][KEY]
    plan = next(plan for key, plan in running.plans.items() if key[0] == ("double_block", 0))
    labels, kept, x = plan.labels()[0], plan.kept()[0], inputs["img"]
    merged = torch.stack([x[:, labels == group].mean(1) for group in range(len(kept))], dim=1)
    rows = torch.cat([torch.arange(7), kept + 7])
    with torch.inference_mode():
        change = (
            block(merged.clone(), inputs["txt"].clone(), inputs["vec"], inputs["pe"][:, :, rows])[0] - merged
        )
    assert torch.allclose(result["img"], x + change[:, labels], atol=1e-5)  # float32, values near 1


@pytest.mark.parametrize("controlled", [False, True])
def test_where_nothing_changes_between_steps_nothing_is_lost(case, controlled, monkeypatch):
    """With equal residuals, skipped steps equal full ones, also if a ControlNet adds between blocks."""
    name, model, shape, more = case
    network, places = model.model.diffusion_model, {"flux": ("input", "output"), "sd3": ("output",)}
    if controlled and name not in places:
        pytest.skip("its ControlNets are of another kind")
    settings = settings_of(model, ratio=0.0, reuse=StepReuse(every=4))
    clone, sampling = patched(model, settings), Sampling(settings, [1 - i / 8 for i in range(9)])
    draw, width = torch.Generator().manual_seed(0), 128 if name == "sd3" else 32
    x, text = torch.randn(shape, generator=draw), torch.randn(2, 7, 24, generator=draw)
    add = {
        place: [torch.randn(2, 48, width, generator=draw) for _ in range(2)] for place in ("input", "output")
    }
    named = {"control": {place: add[place] for place in places[name]}} if controlled else {}
    ran, times = [], torch.full((2,), 0.5)
    for block in settings.target.blocks:
        forward = block.module.forward
        monkeypatch.setattr(block.module, "forward", lambda *a, f=forward, **k: ran.append(1) or f(*a, **k))
    with torch.inference_mode():
        dense = network(x, times, context=text, transformer_options={}, **more, **named)
        whole, ran[:] = len(ran), []
        for i in range(8):
            sampling.begin_step(1 - i / 8, times, shape, True)
            sampling.begin_call(shape, {})
            options, ran[:] = {**clone.model_options["transformer_options"], KEY: sampling}, []
            here = network(x, times, context=text, transformer_options=options, **more, **named)
            finish_run(sampling)
            sampling.end_call(here)
            # float32 over these networks errs by 1e-6 of the largest value.
            assert torch.allclose(here, dense, atol=2e-5 * float(dense.abs().max())), i
            assert len(ran) == (whole if i in settings.config.reuse.steps_of(8).full else 0)


def test_what_another_node_does_between_blocks_happens_in_every_step(monkeypatch):
    """Blocks on both sides of it are skipped one after the other, so that it changes what it should."""
    model, more = Patcher(sd3()), {"y": torch.ones(2, 12)}
    settings = settings_of(model, ratio=0.0, reuse=StepReuse(every=4))
    clone = patched(model, settings)
    replaced = clone.model_options["transformer_options"]["patches_replace"]["dit"]["double_block", 0]

    def doubled(arguments, extra):
        result = replaced(arguments, extra)
        return {**result, "img": 2 * result["img"]}

    clone.set_model_patch_replace(doubled, "dit", "double_block", 0)
    ran = []
    block = settings.target.blocks[1].module
    forward = block.forward
    monkeypatch.setattr(block, "forward", lambda *a, **k: ran.append(1) or forward(*a, **k))
    dense, *others = results_of(clone, settings, IMAGE, more, [0.0] * 4)
    assert len(ran) < 4
    for other in others:
        assert torch.allclose(other, dense, atol=2e-5 * float(dense.abs().max()))


def test_a_block_with_a_mask_of_its_own_ends_the_stack():
    """It runs dense on all tokens, and what the blocks before it added is not lost."""
    model, more = Patcher(flux()), {"y": torch.ones(2, 12)}
    settings = settings_of(model, ratio=0.5, **STACK)
    clone, seen = patched(model, settings), []
    replaced = clone.model_options["transformer_options"]["patches_replace"]["dit"]["double_block", 1]

    def masked(arguments, extra):
        def block(given):
            seen.append(given["img"].shape[1])
            return extra["original_block"](given)

        mask = torch.zeros(1, 1, 7 + 48, 7 + 48)
        return replaced({**arguments, "attn_mask": mask}, {**extra, "original_block": block})

    clone.set_model_patch_replace(masked, "dit", "double_block", 1)
    (merged,) = results_of(clone, settings, IMAGE, more, [0.0])
    assert seen == [48]
    assert not torch.equal(merged, results_of(model, settings, IMAGE, more, [0.0])[0])


def test_a_controlnet_that_begins_in_the_middle_gets_no_residual_of_other_blocks():
    """In its first step, nothing is known of the blocks before it and after it, so nothing is corrected."""
    model, more = Patcher(sd3()), {"y": torch.ones(2, 12)}
    add = torch.randn(2, 48, 128, generator=torch.Generator().manual_seed(0))
    found = []
    for correction in (Correction(every=8), Correction()):
        settings = settings_of(model, ratio=0.5, **{**STACK, "features": "input"}, correction=correction)
        clone = patched(model, settings)
        control = {"output": []}
        results = results_of(clone, settings, IMAGE, {**more, "control": control}, begins(control, add))
        found.append(results[1])
    assert torch.allclose(*found, atol=1e-5 * float(found[0].abs().max()))  # float32


def begins(control, add):
    """Yield the places of two steps; from the second one on, a ControlNet adds something."""
    yield 0.0
    control["output"] += [add, add]
    yield 0.1


def test_tokens_from_before_a_block_can_be_restored_after_it():
    """As a node does that leaves out what a block does."""
    model, more = Patcher(sd3(depth=3)), {"y": torch.ones(2, 12)}
    settings = settings_of(model, ratio=0.5, **STACK)
    results = []
    for calls_it in (True, False):
        clone = patched(model, settings)
        replaced = clone.model_options["transformer_options"]["patches_replace"]["dit"]["double_block", 1]

        def without(arguments, extra, calls_it=calls_it, replaced=replaced):
            if calls_it:
                replaced(arguments, extra)
            return {"img": arguments["img"], "txt": arguments["txt"]}

        clone.set_model_patch_replace(without, "dit", "double_block", 1)
        results += results_of(clone, settings, IMAGE, more, [0.0])
    assert torch.allclose(*results, atol=1e-5 * float(results[0].abs().max()))  # float32


SAMPLED = {"flux": flux, "sd3": sd3}


@pytest.fixture(scope="module", params=SAMPLED)
def sampled(request):
    return hosts.transformer(SAMPLED[request.param]())


def merging(model, start=0.0, end=1.0, **settings):
    config = {"ratio": 0.5, "scope": "block", **settings}
    return patched(model, Settings(ToMeConfig(**config), find_target(model), start, end))


def sizes_of_blocks(model, monkeypatch):
    """Number of image tokens that the first block gets in each call, in order."""
    block, seen = find_target(model).blocks[0].module, []
    forward = block.forward
    monkeypatch.setattr(block, "forward", lambda *a, **k: seen.append(numbers(a, k)) or forward(*a, **k))
    return seen


EVERYTHING = {"reuse": StepReuse(every=2), "correction": Correction(every=2), "proportional": True}


@pytest.mark.parametrize("settings", [{}, EVERYTHING], ids=["merging", "everything"])
def test_two_passes_in_the_sampler(sampled, settings):
    dense, before = hosts.sample(sampled, steps=5), repr(sampled.model_options)
    low, high = merging(sampled, ratio=0.25, **settings), merging(sampled, ratio=0.5, **settings)
    first = hosts.sample(low, steps=5)
    assert not torch.equal(hosts.sample(high, steps=5), first)
    assert torch.equal(hosts.sample(low, steps=5), first)
    assert torch.equal(hosts.sample(merging(high, ratio=0.25, **settings), steps=5), first)
    assert torch.equal(hosts.sample(merging(sampled, ratio=0.0), steps=5), dense)
    assert torch.equal(hosts.sample(sampled, steps=5), dense)
    assert repr(sampled.model_options) == before


def test_start_and_end_percent_in_the_sampler(sampled, monkeypatch):
    seen = sizes_of_blocks(sampled, monkeypatch)
    hosts.sample(merging(sampled, 0.25, 0.75), steps=4, scheduler="simple")
    merged = {size: size == min(seen) for size in set(seen)}
    # Sigmas of 4 steps of the schedule "simple", with shift 3: 1, 0.9, 0.75, 0.5; at 25 %: 0.9, at 75 %: 0.5.
    assert [merged[size] for size in seen] == [False, True, True, False]


def test_lora_before_and_after_the_node(sampled):
    name = next(
        name
        for name in sampled.model.state_dict()
        if name.endswith(("double_blocks.0.img_mlp.0.weight", "joint_blocks.0.x_block.mlp.fc1.weight"))
    )
    weight = sampled.model.state_dict()[name]
    patch = {name: ("diff", (torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)),))}

    def with_lora(given):
        clone = given.clone()
        assert clone.add_patches(patch, 1.0) == [name]
        return clone

    dense = hosts.sample(sampled)
    before, after = hosts.sample(merging(with_lora(sampled))), hosts.sample(with_lora(merging(sampled)))
    assert torch.equal(before, after)
    assert not torch.equal(before, hosts.sample(merging(sampled)))
    assert not torch.equal(before, hosts.sample(with_lora(sampled)))
    assert torch.equal(hosts.sample(sampled), dense)  # unloaded again


class Control(ControlBase):
    """A ControlNet with fixed results, which ComfyUI's sampler asks for in every call."""

    def get_control(self, x_noisy, t, cond, batched_number, transformer_options):
        draw, width = torch.Generator().manual_seed(1), self.width
        add = lambda: [torch.randn(1, 64, width, generator=draw) for _ in range(2)]  # noqa: E731
        return {"input": add(), "output": add()}

    def copy(self):
        return self


@pytest.mark.parametrize("settings", [{}, EVERYTHING], ids=["merging", "everything"])
def test_controlnet_in_the_sampler(sampled, settings):
    control = Control()
    control.width = sampled.model.diffusion_model.hidden_size
    conditions = {
        "positive": hosts.condition(24, 1, control=control, control_apply_to_uncond=True),
        "negative": hosts.condition(24, 2, control=control, control_apply_to_uncond=True),
    }
    plain = hosts.sample(sampled, steps=5, **conditions)
    assert not torch.equal(plain, hosts.sample(sampled, steps=5))
    assert torch.equal(hosts.sample(merging(sampled, ratio=0.0), steps=5, **conditions), plain)
    merged = hosts.sample(merging(sampled, **settings), steps=5, **conditions)
    assert merged.isfinite().all()
    assert not torch.equal(merged, plain)
    assert not torch.equal(merged, hosts.sample(merging(sampled, **settings), steps=5))
    assert torch.equal(hosts.sample(sampled, steps=5, **conditions), plain)


def test_a_cancelled_sampling_leaves_nothing(sampled):
    clone, dense = merging(sampled, **EVERYTHING), hosts.sample(sampled, steps=5)
    whole = hosts.sample(clone, steps=5)

    def cancel(step, *more):
        if step == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        hosts.sample(clone, steps=5, callback=cancel)
    assert torch.equal(hosts.sample(clone, steps=5), whole)
    assert torch.equal(hosts.sample(sampled, steps=5), dense)


def test_auto_times_a_stack_of_blocks(sampled, monkeypatch):
    asked = []
    monkeypatch.setattr(node_settings, "fewest_tokens", lambda *own: asked.extend(own) or pays_from(4))
    settings_for(find_target(sampled), Asked("auto"), hosts.CPU, torch.float32)
    assert [(own.scope, own.has_mask, own.batch) for own in asked] == [("block", True, 1)]


def test_auto_skips_blocks_and_follows_guidance(sampled, monkeypatch):
    """Each sampling gets the plan for its number of steps and its guidance."""
    monkeypatch.setattr(node_settings, "fewest_tokens", lambda *_: pays_from(4))
    seen = sizes_of_blocks(sampled, monkeypatch)
    latent = {"samples": torch.zeros(1, 4, 16, 16)}
    target = find_target(sampled)
    settings = settings_for(target, Asked("auto", speedup=2.5), hosts.CPU, torch.float32)
    for steps, cfg in ((20, 3.0), (20, 6.0), (8, 6.0)):
        clone, text = TokenMerging().merge(sampled, latent, method="auto", speedup=2.5)
        seen.clear()
        hosts.sample(clone, steps=steps, cfg=cfg, scheduler="simple")
        plan = plan_generation(settings.for_sampling(target.grid((1, 4, 16, 16)), steps, cfg).config, steps)
        assert len(seen) == sum(step.kind is StepKind.FULL for step in plan)
        assert "the default method, speedup=2.5, in an example of 20 steps" in text
    clone, text = TokenMerging().merge(sampled, latent, method="auto", step_reuse="off")
    seen.clear()
    hosts.sample(clone, steps=4, scheduler="simple")
    assert len(seen) == 4
    assert "All steps are full: they run the whole model" in text


def test_auto_merges_where_this_changes_the_picture_less_than_skipping_alone(sampled):
    settings = settings_for(find_target(sampled), Asked("auto"), hosts.CPU, torch.float32)
    strong, weak = (settings.for_sampling((1, 64, 64), 20, cfg).config for cfg in (7.0, 3.0))
    assert strong.merges
    assert strong.correction.on
    assert strong.scope == "block"
    assert strong.features == "model_residual"
    assert strong.reuse.every < weak.reuse.every or not weak.merges


def test_reference_pictures_run_dense():
    model = Patcher(flux())
    settings = settings_of(model, ratio=0.5)
    more = {"y": torch.ones(2, 12), "ref_latents": [torch.ones(2, 4, 8, 8)]}
    assert torch.equal(call(patched(model, settings), IMAGE, more, settings), call(model, IMAGE, more))


def test_a_block_that_another_node_replaces_is_called_with_merged_tokens():
    model, seen = Patcher(flux()), []

    def other(arguments, extra):
        seen.append(arguments["img"].shape[1])
        return extra["original_block"](arguments)

    given = model.clone()
    given.set_model_patch_replace(other, "dit", "double_block", 0)
    settings = settings_of(model, ratio=0.5)
    more = {"y": torch.ones(2, 12)}
    once = patched(given, settings)
    assert torch.equal(
        call(patched(once, settings), IMAGE, more, settings),
        call(patched(model, settings), IMAGE, more, settings),
    )
    assert seen == [24]


def test_methods(case):
    _, model, _, _ = case
    target = find_target(model)
    found = settings_for(target, Asked("tomesd", 0.5), hosts.CPU, torch.float32)
    assert found.config.scope == "block"
    assert "Whole blocks" in found.notes[0]
    with pytest.raises(ConfigError, match="another method"):
        settings_for(target, Asked("todo", 0.75), hosts.CPU, torch.float32)
    with pytest.raises(UnsupportedModelError, match="Linear"):
        find_target(Patcher(torch.nn.Linear(4, 4)))
