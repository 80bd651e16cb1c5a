"""Token merging in ComfyUI's UNet, through its own sampler."""

from __future__ import annotations

import comfy_hosts as hosts
import pytest
import torch
from comfy.cldm.cldm import ControlNet as Network
from comfy.controlnet import ControlNet
from comfy.ldm.modules.attention import CrossAttention

from tokenmerge import MergeSharing, StepReuse, ToMeConfig
from tokenmerge.config import dense_outside
from tokenmerge.errors import ConfigError
from tokenmerge.integrations.comfyui import sampling
from tokenmerge.integrations.comfyui import settings as node_settings
from tokenmerge.integrations.comfyui.models import find_target
from tokenmerge.integrations.comfyui.nodes import TokenMerging
from tokenmerge.integrations.comfyui.patch import patched
from tokenmerge.integrations.comfyui.settings import Settings
from tokenmerge.plans import pays_from
from tokenmerge.plans.generation import StepKind, plan_generation

LATENT = {"samples": torch.zeros(1, 4, 16, 16)}


@pytest.fixture(scope="module")
def model():
    return hosts.unet()


@pytest.fixture(scope="module")
def dense(model):
    return hosts.sample(model)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """A device on which merging saves time on every grid; here a tiny one need not."""
    monkeypatch.setattr(node_settings, "fewest_tokens", lambda *_: pays_from(4))


def test_auto_times_merged_attention(model, monkeypatch):
    asked = []
    monkeypatch.setattr(node_settings, "fewest_tokens", lambda *own: asked.extend(own) or pays_from(4))
    node_settings.settings_for(find_target(model), node_settings.Asked("auto"), hosts.CPU, torch.float32)
    assert [(own.scope, own.has_mask, own.batch) for own in asked] == [("layers", True, 2)]


@pytest.fixture
def key_numbers(monkeypatch):
    """Numbers of keys of each attention layer that runs, in order."""
    seen, forward = [], CrossAttention.forward

    def noted(self, x, context=None, *more, **named):
        seen.append((x.shape[1], (x if context is None else context).shape[1]))
        return forward(self, x, context, *more, **named)

    monkeypatch.setattr(CrossAttention, "forward", noted)
    return seen


def merging(model, method="tomesd", ratio=0.5, start=0.0, end=1.0, **more):
    inputs = {"method": method, "ratio": ratio, "start_percent": start, "end_percent": end, **more}
    return TokenMerging().merge(model, LATENT, **inputs)[0]


def with_config(model, **settings):
    return patched(model, Settings(ToMeConfig(**settings), find_target(model)))


def test_ratio_0_is_identity(model, dense):
    for method in node_settings.METHODS:
        if method != "sdtm":
            assert torch.equal(hosts.sample(merging(model, method, 0.0)), dense), method


@pytest.mark.parametrize("method", [name for name in node_settings.METHODS if name != "sdtm"])
def test_every_method_merges_and_is_repeatable(model, method):
    # On so few tokens, the default method only skips steps, and none of three.
    reuse, steps = (node_settings.OF_METHOD, 8) if method == "auto" else ("off", 3)
    clone = merging(model, method, 0.5, step_reuse=reuse)
    first = hosts.sample(clone, steps=steps)
    assert first.isfinite().all()
    assert not torch.equal(first, hosts.sample(model, steps=steps))
    assert torch.equal(hosts.sample(clone, steps=steps), first)


def test_step_reuse_beside_a_preset(model, key_numbers):
    """The deep stages run in every third step."""
    clone, text = TokenMerging().merge(model, LATENT, method="tomesd", step_reuse="on")
    first = hosts.sample(clone, steps=10)
    reuse = StepReuse(every=3)
    full = reuse.steps_of(10).full
    # 7 self-attention layers, of which 4 are below the finest level.
    deep = [n for n, keys in key_numbers if keys != 7 and n <= 64]
    assert len(deep) == 4 * len(full) < 40
    assert torch.equal(hosts.sample(clone, steps=10), first)
    count = len(reuse.steps_of(20).full)
    assert f"Of 20 steps, {count} are full: they run the whole model" in text


def test_auto_plans_each_sampling_for_its_steps_and_guidance(model, key_numbers):
    latent = {"samples": torch.zeros(1, 4, 64, 32)}
    clone, text = TokenMerging().merge(model, latent, method="auto", speedup=1.5)
    assert "the default method, speedup=1.5, in an example of 20 steps" in text
    asked = node_settings.Asked("auto", speedup=1.5)
    settings = node_settings.settings_for(find_target(model), asked, hosts.CPU, torch.float32)
    for steps, cfg in ((20, 7.0), (20, 1.5), (6, 7.0)):
        key_numbers.clear()
        hosts.sample(clone, size=(64, 32), steps=steps, cfg=cfg)
        config = settings.for_sampling((1, 64, 32), steps, cfg).config
        plan = plan_generation(config, steps)
        deep = [n for n, keys in key_numbers if keys != 7 and n <= 512]
        full = sum(step.kind is StepKind.FULL for step in plan)
        assert len(deep) == 4 * full


@pytest.mark.parametrize(("sampler", "noisy"), [("euler_ancestral", True), ("dpmpp_2m", False)])
def test_auto_knows_which_samplers_add_noise(model, sampler, noisy, monkeypatch):
    seen = []
    for_sampling = node_settings.Settings.for_sampling
    monkeypatch.setattr(
        node_settings.Settings,
        "for_sampling",
        lambda own, *facts: (seen.extend(facts[3:]), for_sampling(own, *facts))[1],
    )
    clone, _ = TokenMerging().merge(model, {"samples": torch.zeros(1, 4, 16, 16)}, method="auto")
    hosts.sample(clone, steps=4, sampler=sampler)
    assert {schedule.adds_noise for schedule in seen} == {noisy}


def test_auto_knows_where_a_unet_can_merge(model):
    target = find_target(model)
    settings = node_settings.settings_for(target, node_settings.Asked("auto"), hosts.CPU, torch.float32)
    plans = settings.default.facts.work.plans
    assert sum(plan.blocks for plan in plans) == len(target.blocks)
    assert {plan.level for plan in plans} == set(target.levels)
    assert {part for plan in plans for part in plan.parts} == {"deep", "finest"}
    assert settings.for_sampling((1, 128, 128), 20, 7.0).config.merges


def test_attention_runs_on_half_of_the_tokens(model, key_numbers):
    hosts.sample(merging(model), steps=1)
    self_attention = [numbers for numbers in key_numbers if numbers[1] != 7]
    # 16 × 16 latents: two blocks on the way down and up at level 1 merge, the others stay dense.
    assert set(self_attention) == {(128, 128), (64, 64)}
    assert {n for n, keys in key_numbers if keys == 7} == {256, 64}


def test_keys_alone(model, key_numbers):
    hosts.sample(merging(model, "todo", 0.75), steps=1)
    assert {numbers for numbers in key_numbers if numbers[1] != 7} == {(256, 64), (64, 64)}


def test_cross_attention_merges_queries(model, key_numbers):
    hosts.sample(with_config(model, merge_crossattn=True, merge_attn=False), steps=1)
    assert {numbers for numbers in key_numbers if numbers[1] == 7} == {(128, 7), (64, 7)}
    assert {numbers for numbers in key_numbers if numbers[1] != 7} == {(256, 256), (64, 64)}


def test_the_model_and_its_other_clones_stay_as_they_are(model, dense):
    options = model.model_options
    before = repr(options)
    weights = {name: (id(module), type(module)) for name, module in model.model.named_modules()}
    clone, other = merging(model), model.clone()
    assert not torch.equal(hosts.sample(clone), dense)
    assert torch.equal(hosts.sample(other), dense)
    assert torch.equal(hosts.sample(model), dense)
    assert model.model_options is options
    assert repr(options) == before
    assert {name: (id(module), type(module)) for name, module in model.model.named_modules()} == weights
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.model.modules())


def test_two_passes_with_other_ratios_and_a_node_after_a_node(model, dense):
    low, high = merging(model, ratio=0.25), merging(model, ratio=0.75)
    first = hosts.sample(low)
    assert not torch.equal(hosts.sample(high), first)
    assert torch.equal(hosts.sample(low), first)
    assert torch.equal(hosts.sample(merging(high, ratio=0.25)), first)
    assert torch.equal(hosts.sample(merging(merging(model, "auto"), ratio=0.0)), dense)


@pytest.mark.parametrize(
    ("between", "merged"),
    [((0, 1), [1, 1, 1, 1]), ((0, 0.5), [1, 1, 0, 0]), ((0.5, 1), [0, 0, 1, 1]), ((0.2, 0.5), [0, 1, 0, 0])],
)
def test_start_and_end_percent(model, key_numbers, between, merged):
    """The steps of this schedule are at 0, 33, 67 and 100 % of the noise levels."""
    start, end = between
    hosts.sample(merging(model, start=start, end=end), steps=4)
    assert merged_steps(key_numbers) == merged


def merged_steps(key_numbers):
    """For each step, whether some of the 7 self-attention layers ran on merged tokens."""
    queries = [n for n, keys in key_numbers if keys != 7]
    return [128 in queries[i : i + 7] for i in range(0, len(queries), 7)]


def test_settings_follow_the_steps(model, key_numbers):
    hosts.sample(with_config(model, ratio=0.5, rules=dense_outside(0, 0.5)), steps=4)
    assert merged_steps(key_numbers) == [True, True, False, False]


def test_both_prompts_share_a_plan_also_in_calls_of_their_own(model, monkeypatch):
    """Prompts of different length run one after another; with equal ones they are one batch."""
    made = []

    def planner(features, *more):
        made.append(len(features))
        return hosts_tome(features, *more)

    hosts_tome = sampling.PLANNERS["tome"]
    monkeypatch.setitem(sampling.PLANNERS, "tome", planner)
    clone = with_config(model, ratio=0.5)
    hosts.sample(clone, steps=1)
    assert made == [1] * 3
    made.clear()
    # 7 and 11 words have no small common multiple, so ComfyUI does not batch them.
    hosts.sample(clone, steps=1, negative=hosts.condition(24, 2, words=11))
    assert made == [1] * 3
    made.clear()
    hosts.sample(with_config(model, ratio=0.5, merge_sharing=MergeSharing(guidance=False)), steps=1)
    assert made == [2] * 3


def test_a_prompt_for_a_part_of_the_picture(model):
    area = hosts.condition(24, 1, area=(8, 16, 8, 0)) + hosts.condition(24, 3)
    merged = hosts.sample(merging(model), positive=area)
    assert merged.isfinite().all()
    assert not torch.equal(merged, hosts.sample(model, positive=area))


@pytest.mark.parametrize("size", [(17, 23), (12, 20)])
def test_odd_sizes_and_batches(model, size):
    both = hosts.sample(merging(model, "auto", step_reuse="off"), size=size, batch=2)
    assert both.isfinite().all()
    # No image depends on the others of its batch. float32 over three steps errs by less than 1e-4.
    alone = hosts.sample(merging(model, "auto", step_reuse="off"), size=size)
    assert torch.allclose(both[:1], alone, atol=1e-3 * float(alone.abs().max()))


def test_controlnet(model):
    """A ControlNet adds to the UNet, which merges; the ControlNet itself stays dense."""
    config = {key: value for key, value in hosts.UNET.items() if key not in ("out_channels", "image_size")}
    config.pop("transformer_depth_output"), config.pop("use_temporal_attention")
    network = hosts.seeded(Network(**config, image_size=32, hint_channels=3))
    control = ControlNet(network, load_device=hosts.CPU)
    control.set_cond_hint(torch.rand(1, 3, 128, 128), 1.0, (0.0, 1.0))
    conditions = {
        "positive": hosts.condition(24, 1, control=control, control_apply_to_uncond=True),
        "negative": hosts.condition(24, 2, control=control, control_apply_to_uncond=True),
    }
    plain = hosts.sample(model, **conditions)
    assert not torch.equal(plain, hosts.sample(model))
    assert torch.equal(hosts.sample(merging(model, ratio=0.0), **conditions), plain)
    merged = hosts.sample(merging(model), **conditions)
    assert not torch.equal(merged, plain)
    assert torch.equal(hosts.sample(model, **conditions), plain)


def test_lora_before_and_after_the_node(model, dense):
    name = "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight"
    weight = model.model.state_dict()[name]
    generator = torch.Generator().manual_seed(3)
    patch = {name: ("diff", (torch.randn(weight.shape, generator=generator) * 0.2,))}

    def with_lora(given):
        clone = given.clone()
        clone.add_patches(patch, 1.0)
        return clone

    before, after = hosts.sample(merging(with_lora(model))), hosts.sample(with_lora(merging(model)))
    assert torch.equal(before, after)
    assert not torch.equal(before, hosts.sample(merging(model)))
    assert not torch.equal(before, hosts.sample(with_lora(model)))
    assert torch.equal(hosts.sample(model), dense)  # unloaded again


def test_cancelled_sampling_leaves_nothing(model, dense):
    clone = merging(model)
    whole = hosts.sample(clone)

    def cancel(step, *more):
        if step == 1:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        hosts.sample(clone, callback=cancel)
    assert torch.equal(hosts.sample(clone), whole)
    assert torch.equal(hosts.sample(model), dense)


def test_attention_that_another_node_replaces_stays_dense(model, key_numbers):
    seen = []

    def replaced(q, k, v, options):
        seen.append(q.shape[1])
        return q

    other = model.clone()
    other.set_model_attn1_replace(replaced, "input", 1)
    hosts.sample(merging(other), steps=1)
    assert set(seen) == {256}


def test_another_attention_function_is_still_called(model):
    heads = []

    def other(function, q, k, v, heads_, *more, **named):
        heads.append(named.get("mask") is not None)
        return function(q, k, v, heads_, *more, **named)

    given = model.clone()
    given.model_options["transformer_options"]["optimized_attention_override"] = other
    plain = hosts.sample(merging(model, proportional="on"))
    assert torch.equal(hosts.sample(merging(given, proportional="on")), plain)
    assert any(heads)
    assert not all(heads)


def test_solvers_that_call_the_model_twice_in_a_step(model):
    for sampler in ("heun", "dpmpp_2m", "euler_ancestral", "uni_pc"):
        clone = merging(model, "ca_tome")
        assert torch.equal(hosts.sample(clone, sampler=sampler), hosts.sample(clone, sampler=sampler))


def test_no_attention_at_the_finest_level(key_numbers):
    """As in SDXL: the node merges at the finest level with attention, and says so."""
    coarse = hosts.unet(transformer_depth=[0, 1], transformer_depth_output=[0, 0, 1, 1])
    clone, text = TokenMerging().merge(coarse, LATENT, method="tomesd")
    assert "level 2" in text
    hosts.sample(clone, steps=1)
    assert {numbers for numbers in key_numbers if numbers[1] != 7} == {(32, 32)}
    assert TokenMerging().merge(coarse, LATENT, method="tomesd", levels="1")[1] == text


def test_text(model):
    text = TokenMerging().merge(model, LATENT, method="tomesd", start_percent=0.25)[1]
    assert "level 1: 3 blocks merged, 256 → 128 tokens" in text
    assert "level 2: 4 blocks dense, 64 tokens" in text
    # Of 32 channels and 256 tokens: 4 · 32² · n + 2 · 32 · n², at n = 256 and 128.
    saved = 1 - (4 * 32**2 * 128 + 2 * 32 * 128**2) / (4 * 32**2 * 256 + 2 * 32 * 256**2)
    assert f"{saved:.0%} fewer" in text
    assert "from 25% to 100%" in text
    assert "All steps are full: they run the whole model" in text


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"method": "sdtm"}, "scope"),
        ({"scope": "block"}, "scope"),
        ({"method": "none"}, "method"),
        ({"ratio": 0.8}, "ratio"),
        ({"start": 0.5, "end": 0.5}, "start_percent"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(model, settings, named):
    with pytest.raises(ConfigError, match=named) as error:
        merging(model, **settings)
    assert len(str(error.value)) < 400
