"""What guidance compares shares a plan, however the pipeline calls the model; other images do not."""

from __future__ import annotations

import gc
import inspect
from typing import Any

import cached
import diffusers
import hosts
import pytest
import torch
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES
from torch import nn

from tokenmerge import MergeSharing, ToMeConfig, apply_token_merging
from tokenmerge.config import dense_outside, settings, tome
from tokenmerge.config.checks import one_of
from tokenmerge.planners import PLANNERS
from tokenmerge.planners.importance import importance_of_tokens
from tokenmerge.runtime.blocks import planning
from tokenmerge.runtime.steps.pipeline import guidance_copies, guidance_scale, is_guided

HALF: dict[str, Any] = {"ratio": 0.5, "max_downsample": 8}


class Pipe:
    """As far as merging looks at one."""

    def __init__(self, unet: nn.Module, guides: bool = True, perturbs: bool = False) -> None:
        self.unet = unet
        self.do_classifier_free_guidance, self.do_perturbed_attention_guidance = guides, perturbs


class StableDiffusionInstructPix2PixPipeline(Pipe):
    """Known by its name."""


def last_labels(pipe: Pipe, arguments: dict[str, Any], **settings: Any) -> torch.Tensor:
    """The plan of the last block: behind the first one, samples differ by their prompts."""
    patch = apply_token_merging(pipe, ToMeConfig(**{**HALF, **settings}))
    with patch.record() as plans:
        hosts.call(pipe.unet, **arguments)
    patch.remove()
    return list(plans.values())[-1].plan.labels()


@pytest.mark.parametrize(
    ("pipe", "parts"),
    [
        (Pipe(hosts.unet()), 2),
        (Pipe(hosts.unet(), perturbs=True), 3),
        (Pipe(hosts.unet(), guides=False, perturbs=True), 2),
        (StableDiffusionInstructPix2PixPipeline(hosts.unet()), 3),
    ],
    ids=["cfg", "cfg+pag", "pag", "pix2pix"],
)
def test_parts_of_a_batch_share_a_plan_and_its_images_do_not(pipe, parts):
    arguments = hosts.inputs(2 * parts)
    apart = last_labels(pipe, arguments)
    assert len({tuple(labels.tolist()) for labels in apart}) == 2 * parts
    same = {**arguments, "sample": arguments["sample"][:2].repeat(parts, 1, 1, 1)}
    first, *others = last_labels(pipe, same).split(2)
    assert all(torch.equal(other, first) for other in others)
    assert not torch.equal(first[0], first[1])


def test_a_planner_that_compares_nothing_joins_no_tokens(monkeypatch):
    """It has one plan for all images, and what joins those of guidance would be thrown away."""
    joined = []
    monkeypatch.setattr(planning, "shared_features", lambda features, parts: joined.append(parts))
    of_uniform = last_labels(Pipe(hosts.unet()), hosts.inputs(4), planner="uniform", seed=None)
    assert not joined
    assert len({tuple(labels.tolist()) for labels in of_uniform}) == 1


def test_of_a_pipeline_that_does_not_tell_equal_samples_share_a_plan():
    """PixArt's, CogVideoX's and others only know within their call whether they guide."""
    arguments = hosts.inputs(2)
    guided = {**arguments, "sample": arguments["sample"][:1].repeat(2, 1, 1, 1)}
    pipe = Pipe(hosts.unet())
    del pipe.do_classifier_free_guidance
    one, other = last_labels(pipe, guided)
    assert torch.equal(one, other)


@pytest.mark.parametrize(("guides", "share"), [(True, False), (False, True)])
def test_equal_samples_need_not_share_a_plan(guides, share):
    """Without guidance they are images of two prompts from one seed, of which none may change the other."""
    arguments = hosts.inputs(2)
    guided = {**arguments, "sample": arguments["sample"][:1].repeat(2, 1, 1, 1)}
    one, other = last_labels(Pipe(hosts.unet(), guides), guided, merge_sharing=MergeSharing(guidance=share))
    assert not torch.equal(one, other)


def test_a_picture_that_is_given_to_one_half_only_changes_nothing():
    """InstructPix2Pix and Stable Video Diffusion leave it out of what they guide away from."""
    unet = hosts.unet(in_channels=8, out_channels=4)
    arguments = hosts.inputs(2)
    latents, given = arguments["sample"][:1], torch.randn_like(arguments["sample"][:1])
    samples = torch.cat([latents, given], 1), torch.cat([latents, torch.zeros_like(given)], 1)
    one, other = last_labels(Pipe(unet), {**arguments, "sample": torch.cat(samples)})
    assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("equal", [True, False])
def test_in_a_graph_as_without(equal):
    torch._dynamo.reset()
    pipe = Pipe(hosts.unet())
    arguments = hosts.inputs(2)
    if equal:
        arguments["sample"] = arguments["sample"][:1].repeat(2, 1, 1, 1)
    apply_token_merging(pipe, ToMeConfig(**HALF))
    expected = hosts.call(pipe.unet, **arguments)
    compiled = torch.compile(pipe.unet, fullgraph=True, backend="eager")
    torch.testing.assert_close(hosts.call(compiled, **arguments), expected, rtol=1e-5, atol=1e-5)
    # It is one graph for guidance and for none: with other samples they have plans of their own again.
    other = {**arguments, "sample": hosts.inputs(4)["sample"][2:]}
    torch.testing.assert_close(
        hosts.call(compiled, **other), hosts.call(pipe.unet, **other), rtol=1e-5, atol=1e-5
    )


CALLED_ONCE_A_PROMPT = ("WanTransformer3DModel", "HunyuanVideoTransformer3DModel")


def two_prompts(name: str) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    family = FAMILIES[name]
    first = family.inputs(1, 16, 16)
    text = 100 * torch.randn_like(
        first["encoder_hidden_states"]
    )  # tells on every token, tiny as the model is
    return model_of(family), first, {**first, "encoder_hidden_states": text}


def labels_of(patch: Any, model: nn.Module, arguments: dict[str, Any]) -> torch.Tensor:
    with patch.record() as plans:
        call(model, arguments)
    return list(plans.values())[-1].plan.labels()


@pytest.mark.parametrize("name", CALLED_ONCE_A_PROMPT)
def test_calls_on_one_sample_share_a_plan(name):
    model, first, second = two_prompts(name)
    patch = apply_token_merging(model, ToMeConfig(ratio=0.5))
    own = labels_of(patch, model, {**second, "hidden_states": second["hidden_states"].clone()})
    shared = labels_of(patch, model, first)
    assert torch.equal(labels_of(patch, model, second), shared)
    assert not torch.equal(own, shared)

    # The second call's own plan counts again when the sample, the step or the settings are others.
    model_step = {**second, "timestep": second["timestep"] - 1}
    labels_of(patch, model, first)
    assert not torch.equal(labels_of(patch, model, model_step), shared)
    labels_of(patch, model, first)
    second["hidden_states"].add_(0)
    assert torch.equal(labels_of(patch, model, second), own)
    patch = apply_token_merging(model, ToMeConfig(ratio=0.5, merge_sharing=MergeSharing(guidance=False)))
    labels_of(patch, model, first)
    assert torch.equal(labels_of(patch, model, second), own)


@torch.inference_mode()
def test_calls_on_one_sample_in_inference_mode():
    """Its tensors do not count their changes."""
    model, first, second = two_prompts("WanTransformer3DModel")
    patch = apply_token_merging(model, ToMeConfig(ratio=0.5))
    assert torch.equal(labels_of(patch, model, first), labels_of(patch, model, second))


def test_plans_are_dropped_with_the_sample():
    model, first, second = two_prompts("WanTransformer3DModel")
    apply_token_merging(model, ToMeConfig(ratio=0.5))
    call(model, first)
    assert all(cached.plans(model))
    del first, second
    gc.collect()
    assert not any(cached.plans(model))


def test_with_gradients_calls_have_plans_of_their_own():
    model, first, _ = two_prompts("WanTransformer3DModel")
    apply_token_merging(model, ToMeConfig(ratio=0.5))
    model(**first)
    assert not any(cached.plans(model))


@pytest.mark.parametrize("planner", ["importance", "another"])
@pytest.mark.parametrize("batched", [True, False])
def test_a_guided_planner_is_told_what_guidance_changed_in_the_last_step(batched, planner, monkeypatch):
    asked = []
    monkeypatch.setitem(settings.CHECKS, "planner", one_of((*settings.PLANNERS, "another")))
    for module in (tome, planning):
        monkeypatch.setattr(module, "GUIDED_PLANNERS", ("importance", "another"))

    def plan(features, grid, r, config, step, importance):
        asked.append(importance)
        return PLANNERS["tome"](features, grid, r, config, step)

    monkeypatch.setitem(PLANNERS, planner, plan)
    unet = hosts.unet()
    pipe = Pipe(unet, guides=batched)
    one, other = hosts.inputs(2, seed=0), hosts.inputs(2, seed=1)
    other["sample"] = one["sample"]
    first = {"timestep": torch.tensor(900.0)}
    dense = [call(unet, {**arguments, **first}) for arguments in (one, other)]
    patch = apply_token_merging(pipe, ToMeConfig(ratio=0.01, planner=planner))
    calls = [one, other]
    if batched:
        both = ("sample", "encoder_hidden_states")
        calls = [{**one, **{name: torch.cat([one[name], other[name]]) for name in both}}]
    for index in range(2):
        assert not asked  # the first step knows nothing yet
        patch.at_step(index, 2)
        for arguments in calls:
            call(unet, {**arguments, "timestep": torch.tensor(900.0 - index)})
    expected = (dense[1] - dense[0]).abs().mean(dim=1).flatten(1)
    assert torch.corrcoef(torch.stack([asked[0].flatten(), expected.flatten()]))[0, 1] > 0.99
    asked.clear()
    patch.at_step(0, 2)
    call(unet, calls[0])
    assert not asked  # a new generation knows nothing yet


def guided_batch(seed: int = 0) -> dict[str, Any]:
    """One sample for two prompts."""
    arguments = hosts.inputs(2, seed=seed)
    return {**arguments, "sample": arguments["sample"][:1].repeat(2, 1, 1, 1)}


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        ({"rules": dense_outside(0, 0.5), "merge_sharing": MergeSharing(guidance=False)}, False),
        ({"rules": dense_outside(0, 0.5)}, True),  # for another call on the same sample
        ({"merge_sharing": MergeSharing(every=2, guidance=False)}, True),
        ({"merge_sharing": MergeSharing(blocks=True, guidance=False)}, True),
    ],
)
def test_plans_are_held_only_where_they_are_used_again(settings, held):
    unet, arguments = hosts.unet(), guided_batch()
    patch = apply_token_merging(Pipe(unet), ToMeConfig(**HALF, **settings))
    patch.at_step(0, 4)
    call(unet, arguments)
    assert any(cached.plans(unet)) == held


@pytest.mark.parametrize("settings", [{}, {"rules": dense_outside(0, 0.5)}])
def test_batches_that_are_twice_the_same_share_the_plan_of_the_first_call(settings):
    """Two images of one seed, for each prompt in a call of its own."""
    unet = hosts.unet()
    patch = apply_token_merging(Pipe(unet), ToMeConfig(**HALF, **settings))
    one, other = guided_batch(), guided_batch(seed=1)
    other["sample"] = one["sample"]
    patch.at_step(0, 4)
    labels = []
    for arguments in (one, other):
        with patch.record() as plans:
            call(unet, arguments)
        labels.append(list(plans.values())[-1].plan.labels())
    assert torch.equal(*labels)


def test_gradient_checkpointing_runs_blocks_again_with_the_importance_that_they_had():
    gradients = []
    for checkpoints in (False, True):
        unet = hosts.unet().train()
        if checkpoints:
            unet.enable_gradient_checkpointing()
        patch = apply_token_merging(Pipe(unet), ToMeConfig(**HALF, planner="importance"))
        for index in range(2):  # behind the second call, importance is that of the second
            patch.at_step(index, 4)
            result = unet(**guided_batch(seed=index)).sample
        result.square().mean().backward()
        gradients.append([parameter.grad for parameter in unet.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain, rtol=1e-5, atol=1e-6)


def test_each_tile_has_the_importance_of_its_own(monkeypatch):
    """A pipeline of tiles, which calls for each prompt of each."""
    asked = []

    def plan(features, grid, r, config, step, importance):
        asked.append(importance)
        return PLANNERS["tome"](features, grid, r, config, step)

    monkeypatch.setitem(PLANNERS, "importance", plan)
    unet = hosts.unet()
    prompts = [inputs["encoder_hidden_states"] for inputs in (hosts.inputs(1), hosts.inputs(1, seed=1))]
    patch = apply_token_merging(unet, ToMeConfig(ratio=0.01, planner="importance"))
    for index in range(2):
        patch.at_step(index, 3)
        for seed in range(2):
            tile = hosts.inputs(1, seed=seed)
            for prompt in prompts:
                call(unet, {**tile, "encoder_hidden_states": prompt})
    differences = cached.memory_of(unet).guidance_differences.values()
    expected = [difference.abs().mean(dim=1).flatten() for difference in differences]
    assert len(expected) == 2
    ones = asked[: len(asked) // 2], asked[len(asked) // 2 :]
    for (importance, *_), own, other in zip(ones, expected, expected[::-1], strict=True):
        near, far = (torch.corrcoef(torch.stack([importance.flatten(), x]))[0, 1] for x in (own, other))
        assert near > 0.99 > far


def test_importance_is_the_mean_over_what_a_token_covers():
    change = torch.arange(16.0).view(1, 1, 4, 4) - 4
    found = importance_of_tokens(change, (1, 2, 2))
    assert torch.equal(found, torch.tensor([[(4 + 3 + 0 + 1) / 4, (2 + 1 + 2 + 3) / 4, 6.5, 8.5]]))
    assert torch.equal(importance_of_tokens(-change.flatten(2).mT, (1, 4, 4)), change.abs().flatten(1))
    assert importance_of_tokens(change, (2, 2, 2)) is None


def test_frames_in_the_batch_have_the_importance_of_their_own():
    """Video UNets look at each frame alone; transformers at all, on a grid of several."""
    change = torch.randn(2, 4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    found = importance_of_tokens(change, (1, 2, 2))
    assert found.shape == (6, 4)
    frames = [
        importance_of_tokens(change[i, :, f].unsqueeze(0), (1, 2, 2)) for i in range(2) for f in range(3)
    ]
    torch.testing.assert_close(found, torch.cat(frames))
    assert importance_of_tokens(change, (3, 2, 2)).shape == (2, 12)


def test_importance_that_does_not_fit_the_tokens_is_said():
    unet = hosts.unet()
    patch = apply_token_merging(unet, ToMeConfig(ratio=0.5, planner="importance"))
    inputs = hosts.inputs(2)
    for index in range(2):
        patch.at_step(index, 3)
        call(unet, inputs)
    cached.memory_of(unet).guidance_differences[0] = torch.zeros(5, 4, 16, 16)
    patch.at_step(2, 3)
    with pytest.warns(UserWarning, match=r"shape \(5, 4, 16, 16\) does not fit .* it plans as 'tome' does"):
        call(unet, inputs)


def test_the_guidance_of_pipelines_that_deny_it_is_unknown():
    """Their property is always False, and their call has a variable of its name that is not."""
    denying = []
    for name in dir(diffusers):
        cls = getattr(diffusers, name) if name.endswith("Pipeline") else None
        told = inspect.getattr_static(cls, "do_classifier_free_guidance", None)
        if isinstance(told, property) and told.fget.__code__.co_consts[-1] is False:
            local = inspect.unwrap(cls.__call__).__code__.co_varnames
            if "do_classifier_free_guidance" in local:
                denying.append(cls)
    assert [cls.__name__ for cls in denying] == ["StableDiffusionPanoramaPipeline"]
    for cls in denying:
        pipe = cls.__new__(cls)
        assert pipe.do_classifier_free_guidance is False
        assert is_guided(pipe) is None
        assert guidance_copies(pipe) == 2
        assert guidance_scale(pipe) is None


class Frames:
    """A pipeline with a scale of guidance for each frame, as Stable Video Diffusion; it counts questions."""

    def __init__(self, scale: float) -> None:
        self.guidance_scale, self.asked = torch.full((3,), scale), 0

    @property
    def do_classifier_free_guidance(self) -> torch.Tensor:
        self.asked += 1
        return self.guidance_scale.max() > 1


def test_scales_in_a_tensor_are_read_once_for_each_tensor():
    pipe = Frames(3.0)
    assert [guidance_copies(pipe) for _ in range(4)] == [2] * 4
    assert pipe.asked == 1
    pipe.guidance_scale = torch.ones(3)
    assert [guidance_copies(pipe) for _ in range(4)] == [1] * 4
    assert pipe.asked == 2
    pipe.guidance_scale.fill_(2.0)
    assert guidance_copies(pipe) == 2
    assert is_guided(pipe) is True
