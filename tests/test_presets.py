"""Published methods as presets, on a UNet and two diffusion transformers."""

from __future__ import annotations

import dataclasses
import inspect
import math

import hosts
import pytest
import torch
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES

from tokenmerge import (
    ConfigError,
    MergeSharing,
    NothingToMergeError,
    ToMeConfig,
    apply_token_merging,
    presets,
)
from tokenmerge.runtime.patching.patch import state_of

EVERY = pytest.mark.parametrize("name", presets.__all__)
MODELS = ("UNet2DConditionModel", "SD3Transformer2DModel", "FluxTransformer2DModel")


def test_every_preset_is_a_method_by_its_name():
    made = {name for name, value in vars(presets).items() if inspect.isfunction(value) and name[0] != "_"}
    assert made == set(presets.__all__)


@EVERY
def test_a_preset_takes_a_ratio_and_any_other_setting(name):
    preset = getattr(presets, name)
    assert preset(0.3).ratio == 0.3
    assert preset(planner="tiled", seed=5) == dataclasses.replace(preset(), planner="tiled", seed=5)
    with pytest.raises(ConfigError, match="ratio: expected"):
        preset(1.5)


def test_tomesd_is_what_the_paper_says():
    assert presets.tomesd() == ToMeConfig(ratio=0.5, merge_sharing=MergeSharing(guidance=False))


@EVERY
@pytest.mark.parametrize("family", MODELS)
def test_a_preset_merges_and_leaves_nothing_behind(name, family):
    config = getattr(presets, name)()
    model, arguments = model_of(FAMILIES[family]), FAMILIES[family].inputs(2, 16, 16)
    if config.scope == "keys" and family != "UNet2DConditionModel":
        with pytest.raises(NothingToMergeError, match="scope='keys'"):
            apply_token_merging(model, config)
        return
    dense = call(model, arguments)
    patch = apply_token_merging(model, config)
    results = []
    for step in (0, 5):
        with patch.record() as plans:
            if config.follows_steps:
                patch.at_step(step, 10)
            results.append(call(model, arguments))
        removed = [
            recorded.plan.inverse.shape[1] - recorded.plan.keep.shape[1] for recorded in plans.values()
        ]
        assert removed
        assert min(removed) > 0
        assert torch.isfinite(results[-1]).all()
        assert not torch.equal(results[-1], dense)
    patch.remove()
    assert torch.equal(call(model, arguments), dense)


# Each preset compiles with one model. Which mechanisms compile with which models is tested elsewhere.
COMPILED = {
    **dict.fromkeys(("ca_tome", "ibtm", "todo", "tomesd"), "UNet2DConditionModel"),
    **dict.fromkeys(("sdtm", "sito", "toma"), "SD3Transformer2DModel"),
}


@pytest.mark.slow
@EVERY
def test_a_preset_compiles_without_a_break(name):
    """The whole model is one graph; if settings follow the steps, each block is one."""
    torch._dynamo.reset()
    family = COMPILED[name]
    config, inputs = getattr(presets, name)(), FAMILIES[family].inputs(2, 16, 16)
    eager, compiled = model_of(FAMILIES[family]), model_of(FAMILIES[family])
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
    # 256 tokens minus 0.66, 0.58, … 0.34 of them, by windows of 4 as long as windows merge.
    assert merged == [256 - 56 * 3, 256 - 49 * 3, 128, 256 - 107, 256 - 87]
    assert whole_windows == [True, True, False, False, False]


@pytest.mark.slow
def test_a_soft_plan_and_its_model_compile_into_one_graph():
    torch._dynamo.reset()
    unet = hosts.unet(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        mid_block_type=None,
    )
    apply_token_merging(unet, presets.toma(**{"merge_sharing.every": 1}))
    merged = hosts.call(unet, **hosts.inputs())
    compiled = torch.compile(unet, fullgraph=True, backend="eager")
    assert torch.equal(hosts.call(compiled, **hosts.inputs()), merged)


@EVERY
@pytest.mark.parametrize(
    "ratio", [torch.tensor([]), torch.tensor([0.1, 0.2]), "0.5", None, [0.5], 10**400, object(), math.nan]
)
def test_what_is_no_ratio_is_refused(name, ratio):
    with pytest.raises(ConfigError, match=r"^ratio: expected"):
        getattr(presets, name)(ratio)
