"""Settings that follow the denoising steps: what is dense, planned, held, corrected, and let go."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
from typing import Any

import cached
import hosts
import pytest
import torch
from diffusers import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from tokenmerge import (
    ConfigError,
    Correction,
    MergeSharing,
    StepReuse,
    ToMeConfig,
    UnsupportedModelError,
    apply_token_merging,
)
from tokenmerge.config import dense_outside
from tokenmerge.models.families import qwen_image
from tokenmerge.ops.plan import Plan
from tokenmerge.plans.generation import Merging
from tokenmerge.runtime.memory.caches import Residual, extrapolated, updated
from tokenmerge.runtime.memory.state import STATE, BlockState, LayerState
from tokenmerge.runtime.patching.patch import state_of

HALF: dict[str, Any] = {"ratio": 0.5, "max_downsample": 8}
STEPS = 6


class Loop:
    """A denoising loop of one's own around a model, which changes little from step to step."""

    def __init__(self, model: nn.Module, arguments: dict[str, Any], **settings: Any) -> None:
        self.model, self.arguments = model, arguments
        self.patch = apply_token_merging(model, ToMeConfig(**{**HALF, **settings}))

    def run(self, made: int = STEPS) -> tuple[list[Tensor], list[list[tuple[int, ...]]]]:
        """Results and, for each step that is made, the places that the plans of the last two blocks keep."""
        results, plans = [], []
        name = "sample" if "sample" in self.arguments else "hidden_states"
        torch.manual_seed(1)
        for i in range(made):
            self.patch.at_step(i, STEPS)
            sample = self.arguments[name] + 0.1 * i * torch.randn_like(self.arguments[name])
            now = {**self.arguments, name: sample, "timestep": torch.full((len(sample),), 900.0 - i)}
            with self.patch.record() as recorded:
                results.append(call(self.model, now))
            plans.append([tuple(r.plan.keep.flatten().tolist()) for r in list(recorded.values())[-2:]])
        return results, plans


def dense_results(model: nn.Module, arguments: dict[str, Any]) -> list[Tensor]:
    loop = Loop(model, arguments, ratio=0.0)
    results, _ = loop.run()
    loop.patch.remove()
    return results


def equal(results: list[Tensor], others: list[Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(results, others, strict=True)]


@pytest.mark.parametrize(
    ("settings", "dense"),
    [
        ({"rules": dense_outside(0, 0.5)}, [3, 4, 5]),
        ({"rules": [{"start": 0.8, "ratio": 0}]}, [5]),
        ({"rules": [{"until": 0.5, "ratio": 0}]}, [0, 1, 2]),
        ({"rules": [{"start": 0.5, "ratio": 0.0}]}, [3, 4, 5]),
        (
            {"rules": [{"level": 1, "ratio": 0}, {"level": 2, "ratio": 0}, *dense_outside(0, 0.99)]},
            [0, 1, 2, 3, 4, 5],
        ),
        ({"correction": Correction(every=3)}, [0, 3]),
        (
            {"correction": Correction(every=3), "rules": dense_outside(0, 0.6)},
            [0, 3, 4, 5],
        ),  # no merged step follows the second
        # A plan that is still held, and its corrections, are not for a step that does not merge.
        ({"merge_sharing": MergeSharing(every=6), "rules": dense_outside(0, 0.5)}, [3, 4, 5]),
        ({"correction": Correction(every=6), "rules": dense_outside(0, 0.5)}, [0, 3, 4, 5]),
        ({"merge_sharing": MergeSharing(every=6), "rules": [{"start": 0.34, "until": 0.5, "ratio": 0}]}, [2]),
        ({"rules": dense_outside(0.5, 1)}, [0, 1, 2]),
        ({"rules": dense_outside(0.3, 0.8)}, [0, 1, 5]),
        ({"merge_sharing": MergeSharing(every=6), "rules": dense_outside(0.5, 1)}, [0, 1, 2]),
        ({"reuse": StepReuse(every=2), "rules": dense_outside(0.5, 1)}, [0, 1, 2]),
        # The first step that may merge corrects, however long ago a correction was due.
        ({"correction": Correction(every=3), "rules": dense_outside(0.3, 1)}, [0, 1, 2, 5]),
    ],
)
def test_which_steps_are_dense(settings, dense):
    unet, arguments = hosts.unet(), hosts.inputs()
    expected = dense_results(unet, arguments)
    results, _ = Loop(unet, arguments, **settings).run()
    assert [i for i, same in enumerate(equal(results, expected)) if same] == dense


def test_ratios_follow_the_rules():
    _, plans = Loop(hosts.unet(), hosts.inputs(1), rules=[{"start": 0.5, "ratio": 0.25}]).run()
    kept = [len(last) for _, last in plans]
    assert kept == [256 - int(256 * ratio) for ratio in (0.5, 0.5, 0.5, 0.25, 0.25, 0.25)]


def test_phases_have_plans_of_their_own():
    _, plans = Loop(
        hosts.unet(),
        hosts.inputs(1),
        merge_sharing=MergeSharing(every=6),
        rules=[{"start": 0.5, "ratio": 0.25}],
    ).run()
    assert [len(last) for _, last in plans] == [128, 128, 128, 192, 192, 192]


@pytest.mark.parametrize("share", [False, True])
def test_plans_last_for_so_many_steps(share):
    _, plans = Loop(hosts.unet(), hosts.inputs(1), merge_sharing=MergeSharing(every=3, blocks=share)).run()
    assert plans[0] == plans[1] == plans[2]
    assert plans[3] == plans[4] == plans[5]
    assert plans[2] != plans[3]
    assert (plans[0][0] == plans[0][1]) == share


def test_blocks_share_a_plan_within_a_call_without_steps():
    unet = hosts.unet()
    patch = apply_token_merging(unet, ToMeConfig(**HALF, merge_sharing=MergeSharing(blocks=True)))
    seen = []
    for seed in (0, 1):
        with patch.record() as recorded:
            hosts.call(unet, **hosts.inputs(1, seed=seed))
        ways: dict[Any, set[Any]] = {}
        for path, record in recorded.items():
            way = record.grid, path.partition(".")[0]
            ways.setdefault(way, set()).add(tuple(record.plan.keep.flatten().tolist()))
        assert all(len(plans) == 1 for plans in ways.values())
        # Tokens on the way up are alike in other ways than on the way down.
        finest = (1, 16, 16)
        assert ways[finest, "down_blocks"] != ways[finest, "up_blocks"]
        seen.append(ways)
    assert seen[0] != seen[1]


def differences_within_groups(plan: Plan, x: Tensor) -> Tensor:
    return x - plan.unmerge(plan.merge(x))


@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.parametrize("scope", ["layers", "block"])
@pytest.mark.parametrize(
    "name", ["UNet", "SD3Transformer2DModel", "FluxTransformer2DModel", "WanTransformer3DModel"]
)
def test_a_correction_gives_tokens_back_how_they_differ_from_their_group(name, scope, every):
    """On the input of the dense step, the first module that merges is off by the same in all of a group."""
    model, arguments, of_sample = host_of(name)
    patch = apply_token_merging(model, ToMeConfig(**HALF, scope=scope, correction=Correction(every=every)))
    parts = state_of(model).parts
    first = parts[0]
    layers = (part for part in parts if isinstance(part, LayerState))
    wanted = first if scope == "block" else next(layer for layer in layers if layer.block is first)
    module = next(m for m in model.modules() if m.__dict__.get(STATE) is wanted)
    seen: list[Tensor] = []
    module.register_forward_hook(lambda _, args, result: seen.append(image_of(result)))
    if not every:
        patch.remove()
        call(model, {**arguments, of_sample: arguments[of_sample].clone()})
        patch = apply_token_merging(model, ToMeConfig(**HALF, scope=scope))
    for index in range(2)[not every :]:
        patch.at_step(index, 3)
        with patch.record() as recorded:
            call(model, {**arguments, of_sample: arguments[of_sample].clone()})
    plan = recorded[first.path].plan
    dense, merged = (x[:, x.shape[1] - plan.inverse.shape[1] :] for x in seen)
    lost, noise = differences_within_groups(plan, merged - dense).abs().max(), 1e-5 * dense.abs().max()
    assert not torch.allclose(merged, dense, rtol=1e-3)
    assert (lost < noise) == bool(every)


def image_of(result: Any) -> Tensor:
    """Of the results for text and image, the longer one."""
    return result if isinstance(result, Tensor) else max(result, key=lambda x: x.shape[1])


def host_of(name: str) -> tuple[nn.Module, dict[str, Any], str]:
    """A model, its arguments, and the name of that for the sample."""
    if name == "UNet":
        return hosts.unet(), hosts.inputs(), "sample"
    return model_of(FAMILIES[name]), FAMILIES[name].inputs(2, 8, 8), "hidden_states"


@pytest.mark.parametrize("scope", ["layers", "block"])
def test_a_dense_step_for_corrections_plans_nothing_and_holds_no_plan(scope):
    loop = Loop(hosts.unet(), hosts.inputs(), scope=scope, correction=Correction(every=2))
    _, plans = loop.run()
    assert list(map(bool, plans)) == [False, True] * 3
    loop.run(made=3)
    assert not any(cached.plans(loop.model))


def test_calls_of_one_step_have_corrections_of_their_own():
    """Tiles, or prompts: as if each were the only one."""
    inputs = [hosts.inputs(1, seed=seed) for seed in range(2)]

    def run(*calls: dict[str, Any]) -> list[list[Tensor]]:
        unet = hosts.unet()
        patch = apply_token_merging(unet, ToMeConfig(**HALF, scope="block", correction=Correction(every=3)))
        results: list[list[Tensor]] = [[] for _ in calls]
        for index in range(3):
            patch.at_step(index, 3)
            for made, arguments in zip(results, calls, strict=True):
                made.append(hosts.call(unet, **{**arguments, "sample": arguments["sample"] * (1 + index)}))
        return results

    for both, alone in zip(run(*inputs), [*run(inputs[0]), *run(inputs[1])], strict=True):
        assert all(equal(both, alone))


@pytest.mark.parametrize(
    "settings", [{"reuse": StepReuse(every=2)}, {"scope": "block", "correction": Correction(every=4)}]
)
@pytest.mark.parametrize("name", ["SD3Transformer2DModel", "FluxTransformer2DModel"])
def test_another_text_in_the_middle_may_be_longer(name, settings):
    """Blocks change it together with the image, so that nothing of the shorter one can be used."""
    model, arguments, _ = host_of(name)
    text = arguments["encoder_hidden_states"]
    longer = {**arguments, "encoder_hidden_states": torch.cat([text, text], dim=1)}
    if "txt_ids" in arguments:
        longer["txt_ids"] = torch.cat([arguments["txt_ids"]] * 2)
    patch = apply_token_merging(model, ToMeConfig(**HALF, **settings, seed=None))
    patch.at_step(0, 8)
    alone = call(model, longer)
    for index in range(3):  # the last would go on with what blocks changed, or merge with corrections
        patch.at_step(index, 8)
        result = call(model, longer if index == 2 else arguments)
    assert torch.equal(result, alone)


def test_another_batch_in_the_middle_is_corrected_anew():
    unet, two, three = hosts.unet(), hosts.inputs(2), hosts.inputs(3)
    dense = hosts.call(unet, **three)
    patch = apply_token_merging(unet, ToMeConfig(**HALF, scope="block", correction=Correction(every=3)))
    patch.at_step(0, 4)
    hosts.call(unet, **two)
    patch.at_step(1, 4)
    assert torch.equal(hosts.call(unet, **three), dense)


@pytest.mark.parametrize("scope", ["layers", "block"])
@pytest.mark.parametrize(
    "name", ["UNet", "SD3Transformer2DModel", "FluxTransformer2DModel", "WanTransformer3DModel"]
)
def test_blocks_that_do_not_run_go_on_in_a_straight_line(name, scope):
    """With changes that are the same in each step the result is, too; no block runs for it.

    In a UNet, those of the finest level do.
    """
    model, arguments, of_sample = host_of(name)
    patch = apply_token_merging(model, ToMeConfig(**HALF, scope=scope, reuse=StepReuse(every=2), seed=None))
    ran: list[int] = []
    states = [block for block in state_of(model).blocks if block.level > 1 or block.caches_residuals]
    blocks = [module for module in model.modules() if module.__dict__.get(STATE) in states]
    for block in blocks:
        block.register_forward_hook(lambda *_: ran.append(0))
        first = next(m for m in block.modules() if isinstance(m, nn.Linear))
        first.register_forward_hook(lambda *_: ran.append(1))
    results, counts = [], []
    for index in range(6):
        patch.at_step(index, 6)
        ran.clear()
        results.append(call(model, {**arguments, of_sample: arguments[of_sample].clone()}))
        counts.append(sum(ran))
    assert [count > 0 for count in counts] == [True, True, False, True, False, True]
    for result in results[1:]:
        assert_close(result, results[0], rtol=1e-4, atol=1e-5 * results[0].abs().max().item())


@pytest.mark.parametrize("remove", [False, True])
def test_in_a_unet_nothing_runs_below_the_finest_level(remove):
    unet = hosts.unet()
    patch = apply_token_merging(unet, ToMeConfig(**HALF, reuse=StepReuse(every=3)))
    ran: dict[str, int] = {}
    below = ["down_blocks.1.resnets.0", "mid_block.attentions.0", "up_blocks.0.resnets.1"]
    finest = ["conv_in", "down_blocks.0.attentions.0", "up_blocks.1.resnets.1", "up_blocks.1.attentions.1"]
    for path in (*below, *finest):
        unet.get_submodule(path).register_forward_hook(
            lambda *_, path=path: ran.update({path: ran.get(path, 0) + 1})
        )
    if remove:
        patch.remove()
    for index in range(8):  # it runs in 0, 1, 4 and 7
        if not remove:
            patch.at_step(index, 8)
        hosts.call(unet, **hosts.inputs_at(index))
    assert ran == {**dict.fromkeys(below, 8 if remove else 4), **dict.fromkeys(finest, 8)}


@pytest.mark.parametrize(("every", "steps_of_all"), [(4, [0, 1, 7]), (3, [0, 1, 5, 7]), (2, [0, 1, 3, 5, 7])])
def test_on_some_steps_a_unet_runs_its_first_and_last_convolution_alone(every, steps_of_all):
    unet, steps_of_finest = hosts.unet(), [0, 1, 3, 5, 7]
    config = ToMeConfig(**HALF, reuse=StepReuse(every=every, shallow_every=2))
    patch = apply_token_merging(unet, config)
    ran: dict[str, list[int]] = {}
    below = ["down_blocks.1.resnets.0", "mid_block.attentions.0", "up_blocks.0.resnets.1"]
    finest = ["down_blocks.0.resnets.0", "down_blocks.0.attentions.0", "up_blocks.1.attentions.1"]
    outside = ["conv_in", "conv_out"]
    for path in (*below, *finest, *outside):
        # What is inside of it, as what stands still is called all the same.
        inside = next(m for m in unet.get_submodule(path).modules() if not list(m.children()))
        inside.register_forward_hook(lambda *_, path=path: ran.setdefault(path, []).append(index))
    for index in range(8):
        patch.at_step(index, 8)
        hosts.call(unet, **hosts.inputs_at(index))
    assert all(ran[path] == steps_of_all for path in below)
    assert all(ran[path] == steps_of_finest for path in finest)
    assert all(ran[path] == list(range(8)) for path in outside)


def test_full_steps_lie_where_the_settings_say():
    """A number of them in any generation, with the first two and the last or without; or at given places."""
    assert StepReuse(every=4).steps_of(20).full == (0, 1, 5, 10, 15, 19)
    assert StepReuse(every=100).steps_of(20).full == (0, 1, 19)
    given = StepReuse(full_steps=(0, 0.05, 0.5, 1), shallow_steps=(0.25, 0.75)).steps_of(21)
    assert given.full == (0, 1, 10, 20)
    assert given.finest == (0, 1, 5, 10, 15, 20)
    unet, ran = hosts.unet(), []
    patch = apply_token_merging(unet, ToMeConfig(**HALF, reuse=StepReuse(full_steps=(0, 0.2, 0.6, 1))))
    unet.mid_block.resnets[0].register_forward_hook(lambda *_: ran.append(index))
    for index in range(6):
        patch.at_step(index, 6)
        hosts.call(unet, **hosts.inputs_at(index))
    assert ran == [0, 1, 3, 5]


def test_what_ran_once_stays_as_it_was_until_it_runs_again():
    """The deep stages are skipped in the second step: their result is then that of the first."""
    sample = hosts.inputs(1, seed=0)
    unet, ran = hosts.unet(), []
    patch = apply_token_merging(unet, ToMeConfig(ratio=0, reuse=StepReuse(full_steps=(0, 0.5, 1))))
    unet.mid_block.resnets[0].register_forward_hook(lambda *_: ran.append(index))
    results = []
    for index in range(5):
        patch.at_step(index, 5)
        results.append(hosts.call(unet, **sample))
    assert ran == [0, 2, 4]
    for held in results[1:]:  # on the same input nothing changes, so extrapolating changes nothing either
        torch.testing.assert_close(held, results[0])


def test_full_steps_are_some_of_those_that_run_the_finest_level():
    """So that level runs only where its own setting says so, and neither changes the other's number."""
    for steps in range(3, 60):
        for every, shallow_every in ((3, 2), (4, 1.6), (8, 3), (2.4, 2.4), (5, 1)):
            runs = StepReuse(every=every, shallow_every=shallow_every).steps_of(steps)
            assert {0, 1, steps - 1} <= set(runs.full) <= set(runs.finest)
            assert runs.full == tuple(sorted(set(runs.full)))
            assert len(runs.full) == len(StepReuse(every=every).steps_of(steps).full)
            assert runs.finest == StepReuse(every=shallow_every).steps_of(steps).full


@pytest.mark.parametrize(("path", "reuse"), [("up_blocks.0", (2, 1)), ("up_blocks.1", (2, 2))])
def test_what_comes_up_to_what_runs_of_a_unet_is_taken_on(path, reuse):
    unet, came_up = hosts.unet(), []
    every, finest_every = reuse
    config = ToMeConfig(**HALF, reuse=StepReuse(every=every, shallow_every=finest_every))
    patch = apply_token_merging(unet, config)
    unet.get_submodule(path).register_forward_hook(
        lambda _, args, result: came_up.append(result if isinstance(result, Tensor) else result[0])
    )
    arguments, drift = hosts.inputs(1), torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    for index in range(5):  # it runs in 0, 1 and 3
        patch.at_step(index, 8)
        call(unet, {**arguments, "sample": arguments["sample"] + 0.1 * index * drift})
    zeroth, first, _, third, fourth = came_up
    growths = [(third - first).flatten(), (first - zeroth).flatten()]
    steady = torch.cosine_similarity(*growths, dim=0)
    assert steady > 0.5
    assert_close(fourth, third + steady * (4 - 3) / (3 - 1) * (third - first))


def test_what_a_controlnet_adds_to_the_finest_level_counts_where_nothing_else_runs():
    arguments = hosts.inputs(1)
    # From the first convolution, the finest level, what goes down from it, and the level below.
    channels, sides = (32, 32, 32, 64), (16, 16, 8, 8)

    def third_step(values: tuple[float, ...], middle: float, finest_every: int = 1) -> Tensor:
        """The result of a step in which not all of a UNet runs, with these values added to each."""
        unet = hosts.unet()
        patch = apply_token_merging(
            unet, ToMeConfig(**HALF, reuse=StepReuse(every=2, shallow_every=finest_every))
        )
        for index in range(2):
            patch.at_step(index, 4)
            call(unet, arguments)
        patch.at_step(2, 4)
        added = [
            torch.full((1, c, side, side), value)
            for c, side, value in zip(channels, sides, values, strict=True)
        ]
        result = call(
            unet,
            {
                **arguments,
                "sample": arguments["sample"].clone(),
                "down_block_additional_residuals": added,
                "mid_block_additional_residual": torch.full((1, 64, 8, 8), middle),
            },
        )
        assert state_of(unet).context.decision.deep is not None
        return result

    nothing = third_step((0.0, 0.0, 0.0, 0.0), 0.0)
    assert torch.equal(third_step((0.0, 0.0, 1.0, 1.0), 1.0), nothing)
    assert not torch.equal(third_step((0.0, 1.0, 0.0, 0.0), 0.0), nothing)
    assert not torch.equal(third_step((1.0, 0.0, 0.0, 0.0), 0.0), nothing)
    skipped = third_step((0.0, 0.0, 0.0, 0.0), 0.0, finest_every=2)
    assert torch.equal(third_step((1.0, 1.0, 1.0, 1.0), 1.0, finest_every=2), skipped)


def test_changes_are_taken_on_as_far_as_they_keep_their_direction():
    base, one = torch.zeros(1, 2, 3), torch.ones(1, 2, 3)

    def after(before: Residual | None, value: Tensor) -> Residual:
        return updated(before, (value - base, None))

    def on(residual: Residual, distance: float) -> Tensor:
        result, none = extrapolated(residual, [base, base], torch.tensor(distance))
        assert none is None
        return result

    second = after(after(None, one), 3 * one)
    assert torch.equal(on(second, 3.0), 3 * one)  # no growth before tells that it is steady
    straight = after(second, 4 * one)
    assert_close(on(straight, 1.5), (4.0 + 1.5 * 1.0) * one)
    assert torch.equal(on(after(straight, one), 1.5), one)


def test_how_steady_a_change_is_each_image_says_alone():
    base = torch.zeros(3, 1, 2)
    growths = torch.tensor([[[1.0, 0.0]], [[1.0, 1.0]], [[-1.0, 0.0]]])
    residual = None
    for value in (base, base + torch.tensor([1.0, 0.0]), base + torch.tensor([1.0, 0.0]) + growths):
        residual = updated(residual, (value - base,))
    expected = value + growths * torch.tensor([1, 0.5**0.5, 0]).view(3, 1, 1)
    assert_close(extrapolated(residual, [base], distance=torch.tensor(1.0)), (expected,))


def kept(model: nn.Module) -> list[Any]:
    return cached.everything(cached.memory_of(model))


KEEPING = pytest.mark.parametrize(
    "every",
    [
        {"correction": Correction(every=2)},
        {"reuse": StepReuse(every=2)},
        {"reuse": StepReuse(every=2, shallow_every=2)},
        {"planner": "importance", "merge_sharing": MergeSharing(every=2)},
        {"features": "residual"},
        {"features": "model_residual"},
    ],
)


@KEEPING
def test_nothing_outlives_the_generation(every):
    unet = hosts.unet()
    loop = Loop(unet, hosts.inputs(), scope="block", **every)
    patch, arguments = loop.patch, loop.arguments
    for index in range(4):
        patch.at_step(index, 4)
        hosts.call(unet, **{**arguments, "sample": arguments["sample"].clone()})
        gc.collect()
        assert bool(kept(unet)) == (index < 3)


@KEEPING
def test_removal_in_the_middle_lets_go_of_all(every):
    """Though the handle is still held, and the sample lives."""
    unet = hosts.unet()
    loop = Loop(unet, hosts.inputs(), scope="block", **every)
    loop.patch.at_step(0, 4)
    hosts.call(unet, **loop.arguments)
    memory = cached.memory_of(unet)
    assert cached.everything(memory)
    loop.patch.remove()
    assert not cached.everything(memory)


def test_calls_that_a_step_does_without_keep_nothing():
    """Such as those without the prompt, once guidance is over."""
    unet, one, other = hosts.unet(), hosts.inputs(1, seed=0), hosts.inputs(1, seed=1)
    patch = apply_token_merging(unet, ToMeConfig(**HALF, scope="block", correction=Correction(every=4)))
    counts = []
    for index, calls in enumerate([(one, other), (one, other), (one,), (one,)]):
        patch.at_step(index, 6)
        for arguments in calls:
            hosts.call(unet, **{**arguments, "sample": arguments["sample"].clone()})
        counts.append({len(cache.residuals) for _, cache in cached.caches(unet, BlockState)})
    assert counts == [{2}, {2}, {2}, {1}]


def test_a_single_step_merges():
    """Dense, it would tell what merging loses on steps that there are not."""
    unet, inputs = hosts.unet(), hosts.inputs()
    dense = hosts.call(unet, **inputs)
    patch = apply_token_merging(unet, ToMeConfig(**HALF, correction=Correction(every=2)))
    patch.at_step(0, 1)
    with patch.record() as recorded:
        merged = hosts.call(unet, **inputs)
    assert recorded
    assert not torch.equal(merged, dense)


def test_a_loop_that_goes_on_elsewhere_begins_anew():
    loop = Loop(hosts.unet(), hosts.inputs(), scope="block", correction=Correction(every=4))
    state, ran = state_of(loop.model), []
    for index in (0, 1, 4, 5, 3):
        loop.patch.at_step(index, 8)
        hosts.call(loop.model, **loop.arguments)
        ran.append(state.context.decision.merging is Merging.MEASURES)
    assert ran == [True, False, True, False, True]


def test_reuse_is_refused_where_nothing_can_be_left_out(monkeypatch):
    model = model_of(FAMILIES["QwenImageTransformer2DModel"])
    monkeypatch.setattr(qwen_image, "listed", functools.partial(qwen_image.listed, skippable=False))
    with pytest.raises(UnsupportedModelError, match=r"reuse\.every=2: no part of QwenImage"):
        apply_token_merging(model, ToMeConfig(**HALF, reuse=StepReuse(every=2)))


def test_a_step_that_is_over_is_an_error():
    """Of a loop that does not say so; of a pipeline that shares the model with the one it was applied to."""
    unet, arguments = hosts.unet(), hosts.inputs()
    patch = apply_token_merging(unet, ToMeConfig(**HALF, rules=dense_outside(0, 0.5)))
    patch.at_step(0, 4)
    hosts.call(unet, **arguments)
    hosts.call(unet, **arguments)
    with pytest.raises(ConfigError, match="step 0 of 4 is over"):
        hosts.call(unet, **{**arguments, "timestep": torch.tensor(400)})


def test_corrections_run_beside_a_cache():
    """It leaves out blocks, which then keep nothing and correct with what they have."""
    family = FAMILIES["FluxTransformer2DModel"]
    model, arguments = model_of(family), family.inputs(1, 8, 8)
    patch = apply_token_merging(model, ToMeConfig(ratio=0.5, scope="block", correction=Correction(every=2)))
    model.enable_cache(FirstBlockCacheConfig(threshold=10.0))
    for index in range(3):
        patch.at_step(index, 4)
        with model.cache_context("a"):
            again = {**arguments, "hidden_states": arguments["hidden_states"].clone()}
            assert torch.isfinite(call(model, again)).all()


@pytest.mark.parametrize("first", ["cache", "patch"])
@pytest.mark.parametrize(
    ("cache", "hook"),
    [
        (
            PyramidAttentionBroadcastConfig(
                spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
            ),
            "PyramidAttentionBroadcastHook",
        ),
        (FirstBlockCacheConfig(threshold=0.1), "FBCHeadBlockHook"),
        (MagCacheConfig(num_inference_steps=4, mag_ratios=[1.0] * 4), "MagCacheHeadHook"),
        (TaylorSeerCacheConfig(), "TaylorSeerCacheHook"),
    ],
)
def test_caches_that_count_calls_are_refused(first, cache, hook):
    family = FAMILIES["FluxTransformer2DModel"]
    model, arguments = model_of(family), family.inputs(1, 8, 8)
    config = ToMeConfig(ratio=0.5, scope="block", reuse=StepReuse(every=2))
    refused = pytest.raises(UnsupportedModelError, match=rf"{hook} keeps.*disable_cache\(\)")
    if first == "cache":
        model.enable_cache(cache)
        with refused:
            apply_token_merging(model, config)
        model.disable_cache()
    patch = apply_token_merging(model, config)
    patch.at_step(0, 4)
    if first == "patch":
        model.enable_cache(cache)
        for _ in range(2):  # until it is gone
            with refused:
                call(model, arguments)
        model.disable_cache()
    assert torch.isfinite(call(model, arguments)).all()


def test_a_new_generation_begins_anew():
    unet, arguments = hosts.unet(), hosts.inputs()
    loop = Loop(unet, arguments, correction=Correction(every=4))
    first, _ = loop.run(3)
    assert kept(unet)  # it was cut off
    again, _ = loop.run(3)
    assert all(equal(first, again))


def test_copies_and_pickles_take_nothing_of_a_generation():
    unet, arguments = hosts.unet(), hosts.inputs()
    loop = Loop(unet, arguments, correction=Correction(every=4), merge_sharing=MergeSharing(blocks=True))
    loop.patch.at_step(0, 6)
    hosts.call(unet, **arguments)
    assert kept(unet)
    for copied in (copy.deepcopy(unet), pickle.loads(pickle.dumps(unet))):
        assert not kept(copied)
        with pytest.raises(ConfigError, match="cannot tell the denoising step"):
            hosts.call(copied, **arguments)
    first, second = cached.plans(copy.deepcopy(unet))[-2:]
    assert first is second


def test_copies_take_nothing_of_what_guidance_changed():
    unet, arguments = hosts.unet(), hosts.inputs()
    patch = apply_token_merging(unet, ToMeConfig(**HALF, planner="importance"))
    patch.at_step(0, 6)
    for text in (1, 2):
        hosts.call(unet, **{**arguments, "encoder_hidden_states": text * arguments["encoder_hidden_states"]})
    memory = cached.memory_of(unet)
    assert memory.guidance_differences
    assert memory.sample.result is not None
    assert not kept(copy.deepcopy(unet))


def test_a_model_alone_has_to_be_told_the_step():
    unet = hosts.unet()
    patch = apply_token_merging(
        unet, ToMeConfig(**HALF, rules=dense_outside(0, 0.5), merge_sharing=MergeSharing(every=2))
    )
    with pytest.raises(
        ConfigError,
        match=r"rules\[0\]=\{'start': 0\.5, .* and merge_sharing\.every=2: .* patch\.at_step\(i, steps\)",
    ):
        hosts.call(unet, **hosts.inputs())
    with pytest.raises(ConfigError, match="0 ≤ index < steps, got 3, 3"):
        patch.at_step(3, 3)


@pytest.mark.parametrize("every", [{"correction": Correction(every=2)}, {"reuse": StepReuse(every=2)}])
def test_what_is_kept_is_not_for_training(every):
    unet = hosts.unet()
    patch = apply_token_merging(unet, ToMeConfig(**HALF, **every))
    patch.at_step(0, 4)
    with pytest.raises(ConfigError, match="no_grad"):
        unet(**hosts.inputs())


def test_gradient_checkpointing_runs_blocks_again_with_the_plan_that_they_share():
    arguments, gradients = hosts.inputs(), []
    for checkpoints in (False, True):
        unet = hosts.unet().train()
        if checkpoints:
            unet.enable_gradient_checkpointing()
        apply_token_merging(unet, ToMeConfig(**HALF, merge_sharing=MergeSharing(blocks=True)))
        unet(**arguments).sample.square().mean().backward()
        gradients.append([parameter.grad for parameter in unet.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert_close(again, plain, rtol=1e-5, atol=1e-6)


def _again_with(timestep: float, side: int = 16) -> dict[str, Any]:
    return {**hosts.inputs(height=side, width=side), "timestep": torch.tensor(timestep)}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scope": "block"},
        {"merge_sharing": MergeSharing(blocks=True)},
        {"rules": [{"until": 0.5, "ratio": 0.6}, {"start": 0.5, "ratio": 0.4}]},
        {"ratio": 0.25},
        {"features": "model_residual"},
    ],
)
@pytest.mark.parametrize("side", [16, 24], ids=["another step", "another size"])
def test_gradient_checkpointing_merges_what_it_merged_before_other_calls(settings, side):
    """A step, another with gradients, and a reference without, before any goes backward."""
    gradients = []
    for checkpoints in (False, True):
        unet = hosts.unet().train()
        if checkpoints:
            unet.enable_gradient_checkpointing()
        patch, loss = apply_token_merging(unet, ToMeConfig(**{**HALF, **settings})), 0
        for index, arguments in enumerate((_again_with(900.0), _again_with(500.0, side))):
            patch.at_step(index, 2)
            loss = loss + unet(**arguments).sample.square().mean()
        with torch.no_grad():
            unet(**{**arguments, "encoder_hidden_states": 2 * arguments["encoder_hidden_states"]})
        loss.backward()
        gradients.append([parameter.grad for parameter in unet.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert_close(again, plain, rtol=1e-5, atol=1e-6)


def test_what_a_block_ran_with_goes_with_its_tokens():
    unet = hosts.unet().train()
    apply_token_merging(unet, ToMeConfig(**HALF))
    blocks = state_of(unet).blocks
    unet(**hosts.inputs()).sample.square().mean().backward()
    gc.collect()
    assert not any(len(block.calls) for block in blocks)
    hosts.call(unet, **hosts.inputs())  # without gradients nothing runs again
    assert not any(len(block.calls) for block in blocks)


WAN = "WanTransformer3DModel"


@pytest.mark.parametrize(
    ("name", "settings", "graphs"),
    [
        # The first dense step, the others, and merged ones.
        ("UNet", {"correction": Correction(every=2)}, 3),
        # The finest level of a UNet runs on every step.
        ("UNet", {"reuse": StepReuse(every=2)}, 1),
        # Blocks are skipped outside their graphs.
        (WAN, {"reuse": StepReuse(every=2)}, 1),
        # The first dense step, the others, and merged ones.
        (WAN, {"correction": Correction(every=2), "reuse": StepReuse(every=2)}, 3),
        # Residuals are cached and read outside the graph, which gets a plan.
        ("UNet", {"features": "residual"}, 1),
        (WAN, {"features": "model_residual", "merge_sharing": MergeSharing(blocks=True)}, 1),
        (WAN, {"features": "residual", "reuse": StepReuse(every=2)}, 1),
    ],
)
def test_blocks_compile_in_as_many_graphs_as_kinds_of_steps(name, settings, graphs):
    torch._dynamo.reset()
    settings = {"ratio": 0.5, "scope": "block", **settings}
    counter = CompileCounter()
    (eager, arguments, of_sample), (compiled, *_) = host_of(name), host_of(name)
    patches = [apply_token_merging(model, ToMeConfig(**settings)) for model in (eager, compiled)]
    states = state_of(compiled).blocks
    merging = [module for module in compiled.modules() if module.__dict__.get(STATE) in states]
    for block in merging:
        block.compile(fullgraph=True, backend=counter)
    with torch._dynamo.config.patch(recompile_limit=16):
        for index in range(10):
            for patch in patches:
                patch.at_step(index, 10)
            sample = arguments[of_sample] + 0.1 * index
            wanted, result = (
                call(model, {**arguments, of_sample: sample.clone()}) for model in (eager, compiled)
            )
            assert_close(result, wanted, rtol=1e-5, atol=1e-5)
    assert len(merging) > 1
    plain = of_plain_blocks(name, [block.path for block in states])
    # Where PyTorch 2.7 makes a graph for each block, it makes another one where step reuse skips.
    most = 1 if plain == 1 else 2
    assert graphs * plain <= counter.frame_count <= most * graphs * plain


def of_plain_blocks(name: str, paths: list[str]) -> int:
    """Return the graphs of unpatched blocks: one, and with PyTorch 2.7 one for each block of a UNet."""
    torch._dynamo.reset()
    counter = CompileCounter()
    model, arguments, _ = host_of(name)
    for path in paths:
        model.get_submodule(path).compile(fullgraph=True, backend=counter)
    call(model, arguments)
    return counter.frame_count


# PyTorch 2.7 does not repeat the message of an exception in a graph.
IN_ONE_GRAPH = "Observed exception" if TorchVersion(torch.__version__) < (2, 8) else "one graph"


def test_steps_are_not_for_one_graph():
    torch._dynamo.reset()
    whole = torch.compile(hosts.unet(), fullgraph=True, backend="eager")
    patch = apply_token_merging(whole, ToMeConfig(**HALF, rules=dense_outside(0, 0.5)))
    patch.at_step(0, 2)
    with pytest.raises((UnsupportedModelError, torch._dynamo.exc.TorchDynamoException), match=IN_ONE_GRAPH):
        hosts.call(whole, **hosts.inputs(1))


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation makes."""

    bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        own = [made] if isinstance(made, torch.Tensor) else []
        self.bytes = max([self.bytes, *(tensor.nbytes for tensor in own)])
        return made


def test_a_residual_in_half_precision_is_never_copied_to_float32_as_a_whole():
    """In SDXL at 1024 px the copies took more than twice the memory of all that is cached."""
    generator = torch.Generator().manual_seed(0)
    runs = [torch.randn(2, 3 * 2**20, generator=generator).to(torch.bfloat16) for _ in range(3)]
    runs[2] = 2 * runs[1] - runs[0] + runs[2] / 10
    with Largest() as largest:
        residual = updated(updated(updated(None, (runs[0],)), (runs[1],)), (runs[2],))
    assert largest.bytes == runs[0].nbytes
    changes = (runs[1] - runs[0]).float(), (runs[2] - runs[1]).float()
    expected = torch.cosine_similarity(*changes, dim=1)
    assert (expected > 0.9).all()
    torch.testing.assert_close(residual.agreement[0].flatten().float(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_residuals_of_each_dtype_are_extrapolated(dtype):
    first, last = torch.full((1, 4), 2.0, dtype=dtype), torch.full((1, 4), 3.0, dtype=dtype)
    residual = updated(updated(updated(None, (first - 1,)), (first,)), (last,))
    (forecast,) = extrapolated(residual, [0.0], torch.ones(()))
    assert forecast.dtype == dtype
    assert_close(forecast, last + 1, rtol=2**-8, atol=0)
