"""Published methods as presets, on a UNet and two diffusion transformers."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import math
import statistics
from collections.abc import Iterator
from typing import Any

import cached
import hosts
import pytest
import reference
import torch
from tests.models.family import deeper
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES
from torch import Tensor, nn

from tokenmerge import ConfigError, NothingToMergeError, PlanSharing, ToMeConfig, apply_token_merging, presets
from tokenmerge.runtime.patch import state_of

EVERY = pytest.mark.parametrize("name", presets.__all__)
MODELS = ("UNet2DConditionModel", "SD3Transformer2DModel", "FluxTransformer2DModel")


def model_for(config: ToMeConfig, family: str) -> nn.Module:
    """A model of a family with the stacks that the settings need."""
    model = model_of(FAMILIES[family])
    return deeper(model) if config.scope == "stack" and family != "UNet2DConditionModel" else model


def test_every_preset_is_a_method_by_its_name():
    made = {name for name, value in vars(presets).items() if inspect.isfunction(value) and name[0] != "_"}
    assert made == set(presets.__all__)


@EVERY
def test_a_preset_takes_a_ratio_and_any_other_setting(name):
    preset = getattr(presets, name)
    assert preset(0.3).ratio == 0.3
    assert preset(planner="local", seed=5) == dataclasses.replace(preset(), planner="local", seed=5)
    with pytest.raises(ConfigError, match="ratio: expected"):
        preset(1.5)


def test_tomesd_is_what_the_paper_says():
    assert presets.tomesd() == ToMeConfig(ratio=0.5, plans=PlanSharing(guidance=False))


@EVERY
@pytest.mark.parametrize("family", MODELS)
def test_a_preset_merges_and_leaves_nothing_behind(name, family):
    config = getattr(presets, name)()
    model, arguments = model_for(config, family), FAMILIES[family].inputs(2, 16, 16)
    if config.scope == "keys" and family != "UNet2DConditionModel":
        with pytest.raises(NothingToMergeError, match="scope='keys'"):
            apply_token_merging(model, config)
        return
    dense = call(model, arguments)
    patch = apply_token_merging(model, config)
    results = []
    for step in (0, 1, 2) if config.token_reuse else (0, 5):
        with patch.record() as plans:
            if config.follows_steps:
                patch.at_step(step, 10)
            results.append(call(model, arguments))
        if config.token_reuse and step < 2:
            continue  # dense
        removed = [
            recorded.plan.inverse.shape[1] - recorded.plan.keep.shape[1] for recorded in plans.values()
        ]
        assert removed
        assert min(removed) > 0
        assert torch.isfinite(results[-1]).all()
        assert not torch.equal(results[-1], dense)
    patch.remove()
    assert torch.equal(call(model, arguments), dense)


@EVERY
@pytest.mark.parametrize("family", MODELS[:2])
@torch._dynamo.config.patch(recompile_limit=9)  # SD3.5 has three kinds of blocks, for three kinds of steps
def test_a_preset_compiles_without_a_break(name, family):
    """The whole model is one graph; if settings follow the steps, each block is one."""
    torch._dynamo.reset()
    config, inputs = getattr(presets, name)(), FAMILIES[family].inputs(2, 16, 16)
    if config.scope == "keys" and family != "UNet2DConditionModel":
        pytest.skip("refused: see above")
    eager, compiled = model_for(config, family), model_for(config, family)
    patches = [apply_token_merging(model, config) for model in (eager, compiled)]
    if config.follows_steps:
        blocks = [state.path for state in state_of(compiled).blocks]
        assert blocks
        for path in blocks:
            compiled.get_submodule(path).compile(fullgraph=True, backend="eager")
    else:
        compiled = torch.compile(compiled, fullgraph=True, backend="eager")
    for step in range(3):
        for patch in patches if config.follows_steps else ():
            patch.at_step(step, 10)
        assert torch.equal(call(compiled, inputs), call(eager, inputs))


def test_sdtm_merges_windows_first_and_less_and_less():
    family = FAMILIES["SD3Transformer2DModel"]
    model = model_of(family)
    patch = apply_token_merging(model, presets.sdtm())
    merged, whole_windows = [], []
    for step in range(5):
        with patch.record() as plans:
            patch.at_step(step, 5)
            call(model, {**family.inputs(1, 16, 16), "timestep": torch.full((1,), 900.0 - 100 * step)})
        plan = next(iter(plans.values())).plan
        merged.append(plan.keep.shape[1])
        whole_windows.append(set(plan.sizes[0].tolist()) == {1.0, 4.0})
    # 256 tokens minus 0.7, 0.6, … 0.3 of them, by windows of 4 in the phase with windows.
    assert merged == [256 - 59 * 3, 256 - 51 * 3, 128, 256 - 102, 256 - 76]
    assert whole_windows == [True, True, False, False, False]


def test_a_soft_plan_and_its_model_compile_into_one_graph():
    torch._dynamo.reset()
    unet = hosts.unet(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        mid_block_type=None,
    )
    apply_token_merging(unet, presets.toma(**{"plans.every": 1}))
    merged = hosts.call(unet, **hosts.inputs())
    compiled = torch.compile(unet, fullgraph=True, backend="eager")
    assert torch.equal(hosts.call(compiled, **hosts.inputs()), merged)


def steps_of_a_generation(model: nn.Module, config: ToMeConfig, steps: int) -> Iterator[tuple[Any, Tensor]]:
    """Plans and result of each step, for a sample that changes from step to step."""
    patch, arguments = apply_token_merging(model, config), FAMILIES["SD3Transformer2DModel"].inputs(1, 8, 8)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        patch.at_step(step, steps)
        change = torch.randn(arguments["hidden_states"].shape, generator=generator)
        now = {
            **arguments,
            "hidden_states": arguments["hidden_states"] + 0.3 * change,
            "timestep": torch.full((1,), 900.0 - step),
        }
        with patch.record() as plans:
            result = call(model, now)
        yield plans, result


def test_ras_skips_what_varied_most_in_the_last_result_unless_it_was_skipped_often():
    """m_i exp(-0.1 skips_i), with m_i the mean deviation over the channels in a patch, in loops."""
    model, steps = deeper(model_of(FAMILIES["SD3Transformer2DModel"])), 30
    skips, scores, dense = [0] * 64, [], []
    for step, (plans, result) in enumerate(steps_of_a_generation(model, presets.ras(0.4), steps)):
        if plans:
            kept = {tuple(record.plan.kept()[0].tolist()) for record in plans.values()}
            assert len(kept) == 1
            skipped = sorted(range(64), key=scores.__getitem__, reverse=True)[: int(0.4 * 64)]
            assert sorted(next(iter(kept))) == [i for i in range(64) if i not in skipped]
            for i in skipped:
                skips[i] += 1
        else:
            dense.append(step)
        scores = []
        for i in range(64):
            row, column = 2 * (i // 8), 2 * (i % 8)
            pixels = [result[0, :, row + y, column + x] for y in (0, 1) for x in (0, 1)]
            deviations = [statistics.stdev(pixel.tolist()) for pixel in pixels]
            scores.append(statistics.mean(deviations) * math.exp(-0.1 * skips[i]))
    assert dense == [0, 1, 2, 3, 12, 22]
    assert max(skips) > min(skips)


def test_clusca_computes_16_tokens_and_all_of_them_in_every_6th_step():
    """What each token gets is compared with loops in tests/runtime/test_token_reuse.py."""
    model, kept, dense = model_of(FAMILIES["SD3Transformer2DModel"]), [], []
    for step, (plans, _) in enumerate(steps_of_a_generation(model, presets.clusca(), 20)):
        if not plans:
            dense.append(step)
        kept += [sorted(record.plan.kept()[0].tolist()) for record in list(plans.values())[:1]]
    assert dense == [0, 1, 6, 12, 18]
    assert {len(tokens) for tokens in kept} == {16}
    assert len(set(map(tuple, kept))) == len(kept)  # drawn anew


def test_dito_merges_by_what_blocks_added_a_step_ago_and_what_merged_before_later():
    """cos(y_i, y_j) − λ · count_i for plans at steps 0, 4 and 8, in loops over the tokens of each block."""
    model, seen = model_of(FAMILIES["SD3Transformer2DModel"]), {}

    def note(module: Any, args: Any, given: Any, result: Any) -> None:
        tokens = given["hidden_states"][0].double()
        seen[module] = tokens, result[1][0].double() - tokens

    blocks = {f"transformer_blocks.{i}": block for i, block in enumerate(model.transformer_blocks)}
    for block in blocks.values():
        block.register_forward_hook(note, with_kwargs=True)
    destinations = reference.destinations(8, 8, 2, 2)
    counts, planned, before, penalised = {path: [0] * 64 for path in blocks}, {}, {}, False
    for step, (plans, _) in enumerate(steps_of_a_generation(model, presets.dito(use_rand=False), 10)):
        assert plans.keys() == blocks.keys()
        for path, block in blocks.items():
            count = counts[path]
            if step % 4 == 0:
                y = (before[block][1] if step else seen[block][0]).tolist()
                groups = reference.groups(y, destinations, 32, [0.02 * times for times in count])
                penalised |= groups != reference.groups(y, destinations, 32)
                planned[path] = {i: kept for kept, members in groups.items() for i in members}
                for i, kept in planned[path].items():
                    count[i] += i != kept
            plan = plans[path].plan
            kept, labels = plan.kept()[0].tolist(), plan.labels()[0].tolist()
            assert {i: kept[label] for i, label in enumerate(labels)} == planned[path]
        before = dict(seen)
    assert penalised


def test_ras_needs_nothing_of_a_generation_before():
    """The picture is the same after another one, and the cached result is dropped."""
    model = deeper(model_of(FAMILIES["SD3Transformer2DModel"]))
    first = [result for _, result in steps_of_a_generation(model, presets.ras(), 8)]
    memory = cached.memory_of(model)
    gc.collect()
    assert not cached.everything(memory)
    assert all(map(torch.equal, first, [r for _, r in steps_of_a_generation(model, presets.ras(), 8)]))
