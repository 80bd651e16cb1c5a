"""What plans compare, in every family: residuals of the step before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.models.family import Family
from tests.models.test_every_family import DISTINCT, call, model_of, settings
from tests.models.tiny import FAMILIES
from torch import Tensor, nn

from tokenmerge import (
    Correction,
    MergeSharing,
    StepReuse,
    TokenMergingError,
    ToMeConfig,
    apply_token_merging,
)
from tokenmerge.models.find import find_hosts
from tokenmerge.runtime.blocks import planning
from tokenmerge.runtime.memory.state import STATE
from tokenmerge.runtime.patching import call_context
from tokenmerge.runtime.patching.patch import state_of


@contextmanager
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The features that plans compare while the context lasts, in the order of the plans."""
    found, plan = [], planning.plan_pictures
    with monkeypatch.context() as patched:
        patched.setattr(
            planning, "plan_pictures", lambda planner, x, *rest: found.append(x) or plan(planner, x, *rest)
        )
        yield found


def tensors(values: Any) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor) and value.ndim == 3]


class Watched:
    """Calls of the blocks of a model: the tensors that they got, and those that they returned."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[tuple[list[Tensor], list[Tensor]]] = []
        blocks = find_hosts(model)[0].blocks
        self.sequence_first = {block.module for block in blocks if block.layout.sequence_first}
        for module in dict.fromkeys(block.module for block in blocks):
            module.register_forward_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        given = tensors([*args, *kwargs.values()])
        made = [result] if isinstance(result, Tensor) else tensors(result)
        if module in self.sequence_first:
            given, made = ([x.transpose(0, 1) for x in own] for own in (given, made))
        self.calls.append(([x.clone() for x in given], [y.clone() for y in made]))


def is_part(features: Tensor, sequence: Tensor) -> bool:
    """Whether features are those of successive tokens of a sequence, with text before or after them."""
    n = features.shape[1]
    if sequence.shape[::2] != features.shape[::2]:
        return False
    return any(torch.equal(features, sequence[:, i : i + n]) for i in range(sequence.shape[1] - n + 1))


@DISTINCT
def test_the_residual_is_what_the_block_added_at_the_step_before(family, monkeypatch):
    """With one image, since prompts that share a plan are compared as one. The first step compares inputs."""
    model, arguments = model_of(family), family.inputs(1, 8, 8)
    patch = apply_token_merging(model, settings(family, features="residual"))
    watched, steps = Watched(model), []
    for index in range(2):
        patch.at_step(index, 3)
        watched.calls.clear()
        with compared(monkeypatch) as features:
            call(model, arguments)
        steps.append((features, list(watched.calls)))
    (first, calls), (second, _) = steps
    assert len(first) == len(second) > 0
    for x in first:
        assert any(is_part(x, given) for inputs, _ in calls for given in inputs)
    for x in second:
        changes = (
            y - given for inputs, made in calls for given in inputs for y in made if given.shape == y.shape
        )
        assert any(is_part(x, change) for change in changes)


@DISTINCT
def test_the_residual_of_the_model_is_what_all_blocks_of_the_level_added(family, monkeypatch):
    """It is a tensor that the last block of a level returned minus one that its first block got."""
    model, arguments = model_of(family), family.inputs(1, 8, 8)
    patch = apply_token_merging(model, settings(family, features="model_residual"))
    watched = Watched(model)
    patch.at_step(0, 3)
    call(model, arguments)
    calls = list(watched.calls)
    patch.at_step(1, 3)
    with compared(monkeypatch) as features:
        call(model, arguments)
    assert features
    changes = [
        y - x
        for inputs, _ in calls
        for x in inputs
        for _, made in calls
        for y in (part for result in made for part in windows(result, x.shape[1]))
        if x.shape == y.shape
    ]
    found = [any(is_part(x, change) for change in changes) for x in features]
    assert any(found)
    # Blocks of another width, such as those of a ControlNet-XS beside its UNet, compare their input.
    widths = {x.shape[1:] for x, residual in zip(features, found, strict=True) if residual}
    assert all(residual or x.shape[1:] not in widths for x, residual in zip(features, found, strict=True))
    shared = [x for x, residual in zip(features, found, strict=True) if residual]
    for x in shared:
        same = [other for other in shared if other.shape == x.shape]
        assert len({tuple(other.flatten()[:8].tolist()) for other in same}) <= len(grids_of(model))


def grids_of(model: nn.Module) -> set[Any]:
    """The levels of a model, each of which has one residual, and the grids of images in a sequence."""
    state = model.__dict__[STATE]
    return {(block.level, grid) for block in state.blocks for grid in enumerate(block.grids)}


def windows(sequence: Tensor, n: int) -> list[Tensor]:
    """The first and the last n tokens of a sequence."""
    return [sequence[:, :n], sequence[:, -n:]]


@pytest.mark.parametrize("name", ["UNet2DConditionModel", "SD3Transformer2DModel", "FluxTransformer2DModel"])
def test_ratio_0_stays_bit_equal(name):
    family = FAMILIES[name]
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    dense = call(model, arguments)
    patch = apply_token_merging(model, settings(family, ratio=0, features="residual"))
    for index in range(2):
        patch.at_step(index, 2)
        assert torch.equal(call(model, arguments), dense)


def steps_of(family: Family, numbers: int, monkeypatch: Any, inputs: Any, **changes: Any) -> list[bool]:
    """For each step, whether its first plan compares the input of its block."""
    model = model_of(family)
    patch = apply_token_merging(model, settings(family, features="residual", **changes))
    watched, found = Watched(model), []
    for index in range(numbers):
        patch.at_step(index, numbers + 1)
        watched.calls.clear()
        with compared(monkeypatch) as features:
            call(model, inputs(index))
        found.append(any(is_part(features[0], x) for x in watched.calls[0][0]) if features else None)
    return found


SD3 = FAMILIES["SD3Transformer2DModel"]


CACHED = pytest.mark.parametrize(
    "changes",
    [
        {"features": "residual"},
        {"features": "model_residual"},
        {"features": "model_residual", "merge_sharing.blocks": True},
    ],
)


def two_calls(scales: tuple[float, ...], **changes: Any) -> list[list[tuple[Tensor, list[Tensor]]]]:
    """Result and plans of a call for each scale of the text, at each of 4 steps, with the same sample."""
    model = model_of(SD3)
    config = ToMeConfig.from_dict({"ratio": 0.5, **SD3.merge, **changes})
    patch, generator = apply_token_merging(model, config), torch.Generator().manual_seed(0)
    found: list[list[tuple[Tensor, list[Tensor]]]] = [[] for _ in scales]
    for index in range(4):
        patch.at_step(index, 5)
        arguments = SD3.inputs(1, 8, 8)
        sample = arguments["hidden_states"]
        arguments["hidden_states"] = sample + 0.3 * torch.randn(sample.shape, generator=generator)
        for scale, own in zip(scales, found, strict=True):
            text = arguments["encoder_hidden_states"] * scale
            with patch.record() as plans:
                result = call(model, {**arguments, "encoder_hidden_states": text})
            own.append((result, [recorded.plan.labels() for recorded in plans.values()]))
    return found


@CACHED
def test_two_calls_of_a_step_have_features_of_their_own(changes):
    """When guidance takes two calls and shares no plans, each call is as if it were the only one."""
    changes = {**changes, "merge_sharing.guidance": False}
    for own, scale in zip(two_calls((1.0, 9.0), **changes), (1.0, 9.0), strict=True):
        (alone,) = two_calls((scale,), **changes)
        for (result, plans), (expected, others) in zip(own, alone, strict=True):
            assert torch.equal(result, expected)
            assert all(map(torch.equal, plans, others))


@CACHED
def test_two_calls_on_a_sample_share_the_plan_of_the_first(changes):
    """The features of the first call are compared, and a token counts as merged once in a step."""
    first, second = two_calls((1.0, 9.0), **changes)
    (alone,) = two_calls((1.0,), **changes)
    for (result, plans), (_, shared), (expected, others) in zip(first, second, alone, strict=True):
        assert torch.equal(result, expected)
        assert all(map(torch.equal, plans, others))
        assert all(map(torch.equal, plans, shared))


class GuidedPipe:
    """As far as merging looks at one."""

    do_classifier_free_guidance = True

    def __init__(self, transformer: nn.Module, scale: float | None) -> None:
        self.transformer, self.guidance_scale = transformer, scale


class LuminaPipeline(GuidedPipe):
    """Known by its name."""


def compared_of_copies(
    scale: float | None,
    kept: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
    pipe: type[GuidedPipe] = GuidedPipe,
    **changes: Any,
) -> list[Tensor]:
    """What the first plan of each of 2 steps compares of two copies of a sample, with prompts of their own.

    What the blocks added in the first step is put into ``kept``.
    """
    model = model_of(SD3)
    config = ToMeConfig.from_dict({"ratio": 0.5, **SD3.merge, **changes})
    patch = apply_token_merging(pipe(model, scale), config)
    arguments = SD3.inputs(2, 8, 8)
    arguments["hidden_states"] = arguments["hidden_states"][:1].repeat(2, 1, 1, 1)
    found = []
    for index in range(2):
        patch.at_step(index, 3)
        arguments["hidden_states"] = arguments["hidden_states"] + 0.1  # the sample of another step
        with compared(monkeypatch) as features:
            call(model, arguments)
        found.append(features[0])
        if not index:
            kept += state_of(model).threads.value.memory.model_residuals.values()
    patch.remove()
    return found


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "asked in a tensor"])
@pytest.mark.parametrize("blocks", [False, True], ids=["a plan each", "one plan"])
def test_of_what_was_added_to_copies_what_guidance_makes_is_compared(blocks, on_device, monkeypatch):
    if on_device:  # whether samples are equal is a tensor there, and each copy has its features
        monkeypatch.setattr(call_context, "copies_in_batch", lambda *_: (2, torch.ones((), dtype=torch.bool)))
    kept: list[Tensor] = []
    changes = {"features": "model_residual", "merge_sharing.blocks": blocks}
    _, second = compared_of_copies(4.0, kept, monkeypatch, **changes)
    unguided, guided = kept[0].chunk(2)
    made = unguided + 4.0 * (guided - unguided)
    assert second.shape == (2 if on_device else 1, *made.shape[1:])
    for features in second.split(1):
        torch.testing.assert_close(4.0 * features, made, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [None, 1.0])
def test_without_a_known_scale_the_mean_similarity_of_the_copies_counts(scale, monkeypatch):
    kept: list[Tensor] = []
    found = compared_of_copies(scale, kept, monkeypatch, features="model_residual")
    assert [features.shape[2] for features in found] == [2 * kept[0].shape[2]] * 2


def test_where_the_guided_prompt_comes_first_the_mean_similarity_of_the_copies_counts(monkeypatch):
    found = compared_of_copies(4.0, [], monkeypatch, LuminaPipeline, features="model_residual")
    assert [features.shape[2] for features in found] == [2 * model_of(SD3).inner_dim] * 2


def test_of_the_tokens_themselves_the_mean_similarity_of_the_copies_counts(monkeypatch):
    found = compared_of_copies(4.0, [], monkeypatch, features="input")
    assert [features.shape[2] for features in found] == [2 * model_of(SD3).inner_dim] * 2


def test_another_shape_compares_the_input_even_of_as_many_tokens(monkeypatch):
    grids = [(8, 8), (8, 8), (4, 16), (4, 16)]
    found = steps_of(SD3, 4, monkeypatch, lambda index: SD3.inputs(1, *grids[index]))
    assert found == [True, False, True, False]


def test_plans_kept_for_some_steps_compare_the_step_before_a_new_one(monkeypatch):
    found = steps_of(SD3, 5, monkeypatch, lambda _: SD3.inputs(1, 8, 8), merge_sharing=MergeSharing(every=2))
    assert found == [True, None, False, None, False]


def test_blocks_that_share_a_plan_cache_one_residual():
    model = model_of(SD3)
    patch = apply_token_merging(
        model, settings(SD3, features="residual", merge_sharing=MergeSharing(blocks=True))
    )
    patch.at_step(0, 3)
    call(model, SD3.inputs(2, 8, 8))
    states = [block.module.__dict__[STATE] for block in find_hosts(model)[0].blocks]
    kept = [residual for state in states for residual in state.threads.value.cache.residuals.values()]
    (residual,) = kept
    assert [None if part is None else tuple(part.shape) for part in residual].count((2, 64, 32)) == 1


@pytest.mark.parametrize("name", ["UNet2DConditionModel", "QwenImageTransformer2DModel"])
def test_the_report_counts_what_a_generation_caches(name):
    family = FAMILIES[name]
    model = model_of(family)
    patch = apply_token_merging(model, settings(family, features="residual"))
    patch.at_step(0, 3)
    arguments = family.inputs(2, 16, 16)
    call(model, arguments)
    caches = [part.threads.value.cache for part in model.__dict__[STATE].parts]
    kept = [part for cache in caches for residual in cache.residuals.values() for part in residual]
    kept += [part for cache in caches for plan in cache.plans.values() for part in plan]
    side = arguments["sample"].shape[-1] if name.startswith("UNet") else 32
    counted = patch.report(height=side, width=side, batch=2)
    assert counted.kept_bytes == sum(x.nbytes for x in kept if x is not None) > 0
    assert any("features='residual'" in note for note in counted.notes)


SHARED = MergeSharing(blocks=True)


@pytest.mark.parametrize(
    ("features", "others"),
    [
        ("residual", {"scope": "block", "correction": Correction(every=2)}),
        ("model_residual", {"merge_sharing": SHARED, "reuse": StepReuse(every=2)}),
        ("model_residual", {"merge_sharing": SHARED, "scope": "block", "correction": Correction(every=2)}),
    ],
)
def test_residuals_that_are_cached_anyway_cost_no_memory(features, others):
    model = model_of(SD3)
    counted = [
        apply_token_merging(model, settings(SD3, **own, **others)).report(height=16, width=16).kept_bytes
        for own in ({}, {"features": features})
    ]
    assert counted[0] == counted[1] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": "residual", "planner": "uniform"}, "features: planner='uniform' compares no tokens"),
        (
            {"features": "output"},
            "features: expected one of 'input', 'residual', 'model_residual', got 'output'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes, message):
    with pytest.raises(TokenMergingError, match=message):
        settings(SD3, **changes)
