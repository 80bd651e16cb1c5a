"""The default method: what it chooses, for which pipelines, and its timing of attention."""

from __future__ import annotations

import dataclasses
import json
import math
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import hosts
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from tests.kernels import backend
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES
from torch import nn

from tokenmerge import (
    ConfigError,
    NothingToMergeError,
    ToMeConfig,
    apply_token_merging,
    token_merging,
)
from tokenmerge.auto import choose
from tokenmerge.config import dense_outside, flat
from tokenmerge.models.find import find_hosts
from tokenmerge.models.unet_stages import work_of
from tokenmerge.planners import PLANNERS, calibration
from tokenmerge.runtime.patching.patch import state_of
from tokenmerge_tools.method_spec import MethodSpec


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def fast(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which merging is faster on every grid."""
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: 16)


def pipeline(**models: Any) -> SimpleNamespace:
    return SimpleNamespace(**models, scheduler=SimpleNamespace(timesteps=None))


def test_a_number_alone_chooses_all_else(fast):
    unet = hosts.unet()
    apply_token_merging(pipeline(unet=unet), 0.3)
    state = state_of(unet)
    assert state.config == choose(pipeline(unet=unet), 0.3)
    assert (state.config.ratio, state.config.planner, state.config.proportional) == (0.3, "tiled", True)
    assert state.config.max_downsample == 2  # all levels
    assert (state.config.reuse.every, state.config.reuse.span) == (2, 0.2)
    assert (state.config.scope, state.config.correction.every) == ("layers", 2)
    more = choose(pipeline(unet=unet), 0.6)
    # In UNets, whole blocks and, from 0.4 on, corrections lose more than they save.
    assert (more.scope, more.correction.every, more.reuse.every) == ("layers", 0, 3.4)
    assert [choose(pipeline(unet=unet), ratio).ratio for ratio in (0.5, 0.75)] == [0.5, 0.6]
    between = [choose(pipeline(unet=unet), ratio) for ratio in (0.25, 0.49, 0.5)]
    assert [(found.correction.every, found.reuse.every) for found in between] == [(2, 2), (0, 2.9), (0, 3)]
    assert choose(unet, 0.6).scope == "layers"
    # On small grids, merging attention costs more than skipping steps. Without steps to follow, nothing can
    # be skipped.
    assert (state.config.min_tokens, more.min_tokens, choose(unet, 0.3).min_tokens) == (2048, 2048, 16)
    with token_merging(unet, speedup=2.0) as patch:
        assert state_of(unet).config.ratio == 0.2
        assert patch.report().rows
    assert state_of(unet) is not None
    with pytest.raises(ConfigError, match="ratio: expected 0 ≤ ratio"):
        apply_token_merging(unet, speedup=2.0)
    with pytest.raises(ConfigError, match=r"expected a ratio such as 0\.5, a ToMeConfig"):
        apply_token_merging(unet, True)


def test_a_model_alone_has_no_steps_to_follow(fast):
    unet = hosts.unet()
    assert not choose(unet, 0.5).follows_steps
    apply_token_merging(unet, speedup=2.0)
    assert torch.isfinite(hosts.call(unet, **hosts.inputs())).all()


@pytest.mark.parametrize(
    ("sigmas", "full"),
    [
        (None, [0, 2, 5, 7, 10, 12, 15, 17]),  # as Stable Diffusion 3 has them, with no noise before the last
        (np.linspace(1, 1 / 20, 20).tolist(), [0, 1, 5, 8, 11, 14, 17, 19]),  # as FLUX.1
    ],
)
def test_the_schedule_says_where_the_full_steps_of_a_transformer_lie(sigmas, full, fast):
    class Pipeline(SimpleNamespace):  # unlike a namespace, it can be referenced weakly
        pass

    model, scheduler = model_of(FAMILIES["SD3Transformer2DModel"]), FlowMatchEulerDiscreteScheduler()
    pipe, ran = Pipeline(transformer=model, scheduler=scheduler), []
    apply_token_merging(pipe, speedup=2.0)
    layer = model.transformer_blocks[0].attn.to_q  # a hook would keep the block in every step
    plain = layer.forward
    layer.forward = lambda tokens: (ran.append(index), plain(tokens))[1]
    scheduler.set_timesteps(20, **({} if sigmas is None else {"sigmas": sigmas}))
    arguments = FAMILIES["SD3Transformer2DModel"].inputs(1, 8, 8)
    for index, timestep in enumerate(scheduler.timesteps):  # noqa: B007
        call(model, {**arguments, "timestep": timestep.expand(1)})
        scheduler.step(torch.zeros(1), timestep, torch.zeros(1))
    assert ran == full


@pytest.mark.parametrize("name", ["SD3Transformer2DModel", "FluxTransformer2DModel", "WanTransformer3DModel"])
def test_transformers(name, fast):
    family = FAMILIES[name]
    model = model_of(family)
    config = choose(pipeline(transformer=model), 0.5)
    assert [len(config.reuse.steps_of(steps).full) for steps in (10, 15, 16, 50)] == [10, 8, 6, 18]
    less = choose(pipeline(transformer=model), 0.25)
    assert [len(less.reuse.steps_of(steps).full) for steps in (15, 16, 50)] == [15, 9, 26]
    strong = config.at_guidance(7.0)
    assert (strong.scope, strong.correction.every, strong.reuse.every) == ("block", 6, 1.75)
    assert (less.at_guidance(7.0).ratio, less.at_guidance(7.0).reuse.every) == (0.5, 1.38)
    assert config.at_guidance(4.9) == config.at_guidance(None)
    assert (config.min_tokens, choose(model, 0.5).min_tokens) == (2048, 16)
    # One plan for all blocks, by what they added. Without steps, only the input can be compared.
    assert (config.features, config.plans.blocks) == ("model_residual", True)
    assert (choose(model, 0.5).features, choose(model, 0.5).plans.blocks) == ("input", False)
    more = choose(pipeline(transformer=model), 0.6)
    assert [(c.scope, c.correction.every) for c in (config, more)] == [("layers", 2), ("block", 2)]
    patch = apply_token_merging(pipeline(transformer=model), 0.5)
    for index in range(2):
        patch.at_step(index, 20)
        with torch.no_grad():
            model(**family.inputs(2, 8, 8))


@pytest.mark.parametrize("name", ["UNet", "SD3Transformer2DModel"])
@pytest.mark.parametrize("guidance", [1.0, 7.5])
def test_a_higher_ratio_skips_more_steps(name, guidance, fast):
    """Also if grids are too small to merge; then this is all that the ratio decides."""
    pipe = pipeline(model=hosts.unet() if name == "UNet" else model_of(FAMILIES[name]))
    configs = [choose(pipe, ratio).at_guidance(guidance) for ratio in (0.1, 0.25, 0.5, 0.6, 0.75)]
    full = [len(config.reuse.steps_of(20).full) for config in configs]
    assert full == sorted(set(full), reverse=True)
    assert full[0] < 20


def test_strong_guidance_in_unets_with_much_attention_merges_more_and_skips_the_finest_level_less(fast):
    pipe = pipeline(unet=hosts.unet(block_out_channels=(32, 64)))
    for ratio in (0.1, 0.25, 0.4, 0.5, 0.6, 0.75):
        plain, strong = (choose(pipe, ratio).at_guidance(scale) for scale in (4.9, 5.0))
        assert plain == choose(pipe, ratio).at_guidance(None)
        assert strong.ratio >= plain.ratio
        assert strong.sx > plain.sx
        assert not strong.correction.on
        for steps in (20, 28, 50):
            finest = (c.reuse.steps_of(steps).shallow for c in (strong, plain))
            skipped, more = (set(range(steps)) - set(shallow) for shallow in finest)
            assert len(skipped) < len(more)
            assert bool(skipped) is (ratio > 0.25)
            assert skipped <= set(range(round(0.5 * steps), round(0.9 * steps))) or ratio > 0.6
    removed = [choose(pipe, ratio).at_guidance(7.5).ratio for ratio in (0.1, 0.25, 0.4, 0.6, 0.75)]
    assert removed == [0.18, 0.45, 0.5, 0.7, 0.75]
    assert [choose(pipe, ratio).at_guidance(7.5).reuse.start for ratio in (0.1, 0.25, 0.4)] == [0.6, 0.6, 0]


@pytest.mark.parametrize("channels", [(320, 384), (128, 512)])
def test_strong_guidance_in_unets_with_little_attention_merges_less(channels, fast):
    """As in Stable Diffusion 1.5 and SDXL. Where the finest level is little work too, steps skip the same."""
    pipe = pipeline(unet=hosts.unet(block_out_channels=channels))
    finest = work_of(find_hosts(pipe)[0]).finest_share
    assert work_of(find_hosts(pipe)[0]).attention_share < 0.3
    assert (finest > 0.2) is (channels == (320, 384))
    ratios = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75)
    for ratio in ratios:
        plain, strong = (choose(pipe, ratio).at_guidance(scale) for scale in (4.9, 5.0))
        assert strong.ratio <= plain.ratio
        assert not strong.correction.on
        if finest > 0.2:
            runs = strong.reuse.steps_of(20)
            assert bool(set(range(20)) - set(runs.shallow)) is (ratio > 0.25)
        else:
            assert strong.reuse == plain.reuse
    strong = [choose(pipe, ratio).at_guidance(7.5) for ratio in ratios]
    assert [config.ratio for config in strong] == [0.1, 0.25, 0.35, 0.45, 0.45, 0.6]
    if finest > 0.2:
        assert [config.reuse.every for config in strong] == [1.52, 2.3, 2.5, 3, 4, 4]


@pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning")
@pytest.mark.parametrize("name", ["EulerAncestralDiscrete", "DDPM", "DPMSolverMultistep"])
def test_solvers_that_add_noise_run_the_finest_level_in_all_steps_and_merge_more(name, fast):
    """Under strong guidance, up to a ratio of 0.6."""
    sde = {"algorithm_type": "sde-dpmsolver++"} if name == "DPMSolverMultistep" else {}
    unet = hosts.unet(block_out_channels=(32, 64))
    found = {}
    for noise, scheduler in (
        (True, getattr(diffusers, f"{name}Scheduler")(**sde)),
        (False, diffusers.DDIMScheduler()),
    ):
        pipe = SimpleNamespace(unet=unet, scheduler=scheduler)
        found[noise] = [choose(pipe, ratio) for ratio in (0.25, 0.4, 0.5, 0.6, 0.75)]
    assert [config.at_guidance(3) for config in found[True]] == [c.at_guidance(3) for c in found[False]]
    strong, others = ([config.at_guidance(7.5) for config in found[noise]] for noise in (True, False))
    assert (strong[0], strong[-1]) == (others[0], others[-1])
    for config, other in zip(strong[1:-1], others[1:-1], strict=True):
        assert config.reuse.steps_of(20, True).shallow == tuple(range(20))
        assert len(other.reuse.steps_of(20, True).shallow) < 20
        assert config.ratio == pytest.approx(other.ratio + 0.05)


@pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning")
def test_solvers_that_amplify_what_alternates_run_the_finest_level_in_all_steps(fast):
    """Compares the effect of one error in earlier steps with alternating and with equal signs."""

    def amplification(name: str) -> float:
        def step(sign: int, number: int) -> float:
            scheduler = getattr(diffusers, name)(
                **({"skip_prk_steps": True} if name == "PNDMScheduler" else {})
            )
            scheduler.set_timesteps(20)
            for i, timestep in enumerate(scheduler.timesteps[:number]):
                error = torch.full((1, 1, 1, 1), float(sign**i))
                sample = scheduler.scale_model_input(torch.zeros_like(error), timestep)
                after = scheduler.step(error, timestep, sample, return_dict=False)[0]
            return abs(after.item())

        return max(step(-1, number) / step(1, number) for number in (10, 14, 18))

    for name in (
        "DDIM",
        "EulerDiscrete",
        "DPMSolverMultistep",
        "UniPCMultistep",
        "PNDM",
        "IPNDM",
        "LMSDiscrete",
    ):
        scheduler = getattr(diffusers, f"{name}Scheduler")()
        pipe = SimpleNamespace(unet=hosts.unet(block_out_channels=(32, 64)), scheduler=scheduler)
        plain, strong = (choose(pipe, 0.5).at_guidance(scale).reuse.steps_of(20) for scale in (3.0, 7.5))
        amplifies = amplification(f"{name}Scheduler") > 4
        assert (len(strong.shallow) == 20) is amplifies
        assert (len(strong.full) > len(plain.full)) is amplifies
        assert len(plain.shallow) < 20


def test_where_nothing_merges_and_steps_run_less_the_report_says_so(fast):
    family = FAMILIES["SD3Transformer2DModel"]
    patch = apply_token_merging(pipeline(transformer=model_of(family)), 0.5)
    assert not patch.report().rows
    assert patch.report().flops_merged == patch.report().flops_dense
    assert "fewer than min_tokens=2048 tokens" in str(patch.report())
    assert "1 of 3 steps runs all" in str(patch.report())
    assert "those of the step that merges most" in str(patch.report())
    assert "correction.every" not in str(patch.report())


@pytest.mark.parametrize(("steps", "dense"), [(4, True), (9, True), (10, False)])
def test_a_generation_in_which_nothing_is_saved_says_so(steps, dense, fast):
    """Too few tokens to merge, and too few steps to skip any."""
    unet, inputs = hosts.unet(), hosts.inputs()
    wanted = hosts.call(unet, **inputs)
    patch = apply_token_merging(pipeline(unet=unet), 0.4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(steps):
            patch.at_step(index, steps)
            result = hosts.call(unet, **inputs)
            assert torch.equal(result, wanted) or not dense
    told = [str(warning.message) for warning in caught]
    assert len(told) == dense
    assert all(
        f"of {steps} steps the default method leaves none out, and on 256 tokens" in text for text in told
    )


@pytest.mark.parametrize(("steps", "dense"), [(1, True), (2, False)])
def test_a_generation_that_is_over_before_anything_merges_says_so(steps, dense):
    unet = hosts.unet()
    patch = apply_token_merging(pipeline(unet=unet), ToMeConfig(ratio=0.5, rules=dense_outside(0, 0.5)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.at_step(0, steps)
        hosts.call(unet, **hosts.inputs())
    told = [
        "this generation is dense: by the rules {'start': 0.5, 'ratio': 0.0, 'reference_ratio': None, "
        "'reuse.every': 1}, nothing merges in any of 1 step; leave more steps between their start and until, "
        "or take more steps"
    ]
    assert [str(warning.message) for warning in caught] == (told if dense else [])


@pytest.mark.parametrize(
    ("changes", "found"),
    [({"reuse.every": 1}, (1, 1)), ({"reuse.shallow_every": 3}, (3, 3)), ({"reuse_every": 4}, (4, 2))],
)
def test_what_is_asked_for_goes_before_what_auto_chooses(changes, found, fast):
    config = MethodSpec("auto", changes).config(pipeline(unet=hosts.unet(block_out_channels=(32, 64))))
    assert (config.reuse.every, config.reuse.shallow_every) == found


def test_a_ratio_asks_auto_and_does_not_replace_what_it_chooses(fast):
    pipe = pipeline(unet=hosts.unet())
    assert MethodSpec("auto", {"ratio": 0.75}).config(pipe) == choose(pipe, 0.75)
    assert choose(pipe, 0.75).ratio < 0.75


@pytest.mark.parametrize(
    "changes",
    [
        {"reuse.every": 1},
        {"reuse.every": 1.5},
        {"reuse.full_steps": (0, 0.5, 1)},
        {"reuse.shallow_from": 0.5, "reuse.shallow_until": 0.9},
        {"correction.every": 3, "sx": 2},
        {"scope": "layers"},
        {"rules": [{"guidance": 6.0, "ratio": 0.1}]},
    ],
)
@pytest.mark.parametrize("name", ["UNet", "SD3Transformer2DModel"])
def test_a_changed_setting_of_auto_holds_at_every_guidance(name, changes, fast):
    """What auto sets by guidance is left out where the user has set it, and stays elsewhere."""
    unet = hosts.unet(block_out_channels=(32, 64))
    pipe = pipeline(model=unet if name == "UNet" else model_of(FAMILIES[name]))
    own, changed = choose(pipe, 0.5), MethodSpec("auto", changes).config(pipe)
    assert own.rules
    for scale in (None, 3.0, 7.5):
        found = flat(vars(changed.at_guidance(scale)))
        if "rules" in changes:
            assert found["ratio"] == (0.1 if scale == 7.5 else own.ratio)
            continue
        assert {key: found[key] for key in changes} == changes
        follows = "reuse.shallow_every"  # what a lower reuse.every lowers too
        expected = flat(vars(own.at_guidance(scale))) | changes
        assert {**found, follows: 0} == {**expected, follows: 0}
        assert found[follows] == min(expected[follows], found["reuse.every"])


def test_a_ratio_of_0_is_dense(fast):
    unet = hosts.unet()
    inputs = hosts.inputs()
    dense = hosts.call(unet, **inputs)
    patch = apply_token_merging(pipeline(unet=unet), 0.0)
    assert not state_of(unet).config.follows_steps
    assert torch.equal(hosts.call(unet, **inputs), dense)
    assert "every block stays dense, as asked" in str(patch.report())
    assert choose(pipeline(unet=unet), 0.0).max_downsample == 2  # as SDXL needs, to be patched at all


def test_a_costly_finest_level_of_a_unet_does_not_run_on_every_step(fast):
    """This depends on its share of the work: large in SD 1.5, almost nothing in SDXL.

    Below 0.5 it runs in all of the first steps, which lose most. Between ratios that were measured, settings
    are interpolated.
    """

    def finest_every(channels: tuple[int, int]) -> list[tuple[int, float]]:
        pipe = pipeline(unet=hosts.unet(block_out_channels=channels))
        (host,) = find_hosts(pipe)
        shares.append(work_of(host).finest_share)
        found = [choose(pipe, ratio) for ratio in (0.125, 0.25, 0.5)]
        return [(config.reuse.shallow_every, config.reuse.shallow_from) for config in found]

    shares: list[float] = []
    assert finest_every((32, 64)) == [(1.5, 0.3), (2, 0.3), (2, 0)]
    assert finest_every((32, 160)) == [(1, 0)] * 3
    assert shares[0] > 0.2 > shares[1]


def test_small_pictures_are_an_error_only_if_nothing_is_saved(monkeypatch):
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: 4096)
    unet = hosts.unet()
    with pytest.raises(NothingToMergeError, match="which the default method removes none"):
        apply_token_merging(unet, speedup=2.0)
    apply_token_merging(pipeline(unet=unet), 0.5)  # steps without blocks save time at any size


def test_blocks_in_which_nothing_merges_compare_no_tokens(monkeypatch):
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: 4096)
    monkeypatch.setitem(PLANNERS, "tiled", lambda *_: pytest.fail("tokens were compared"))
    unet = hosts.unet()
    patch = apply_token_merging(pipeline(unet=unet), 0.5)
    for index in range(2):
        patch.at_step(index, 20)
        hosts.call(unet, **hosts.inputs())


def test_attention_by_other_kernels_is_not_asked_for_sizes(fast):
    from diffusers.models.attention_processor import AttnProcessor

    unet = hosts.unet()
    unet.set_attn_processor(AttnProcessor())
    assert not choose(unet, 0.5).proportional
    apply_token_merging(unet, speedup=2.0)
    hosts.call(unet, **hosts.inputs())


def test_attention_of_a_model_without_processors_is_looked_at(fast):
    """CompVis repositories have one class that multiplies matrices, and one that calls PyTorch's."""
    model = hosts.LatentDiffusion()
    assert choose(model, 0.5).proportional

    class CrossAttention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("b i j, b j d -> b i d", (x @ x.mT).softmax(-1), x)

    layers = [module for module in model.modules() if type(module).__name__ == "CrossAttention"]
    layers[0].__class__ = CrossAttention
    assert not choose(model, 0.5).proportional


@pytest.mark.parametrize("name", ["native", "flash", "sage"])
def test_backends_that_take_no_mask_have_proportional_attention_too(name, fast):
    family = FAMILIES["FluxTransformer2DModel"]
    model, arguments = model_of(family), family.inputs(1, 8, 8)
    results = {}
    with backend(name):
        assert choose(model, 0.5).proportional
        for proportional in (False, True):
            config = dataclasses.replace(choose(model, 0.5), min_tokens=0, proportional=proportional)
            apply_token_merging(model, config)
            results[proportional] = call(model, arguments)
    assert not torch.allclose(results[True], results[False], rtol=1e-3)


def test_perturbed_attention_guidance_is_not_asked_for_sizes(fast):
    pipe = pipeline(unet=hosts.unet(), pag_applied_layers=["mid"])
    assert not choose(pipe, 0.5).proportional


@pytest.mark.parametrize(
    ("stored", "norms", "timed"),
    [
        (torch.float16, torch.float16, torch.float16),
        (torch.float8_e4m3fn, torch.bfloat16, torch.bfloat16),
        (torch.uint8, torch.float16, torch.float16),
        (torch.int8, torch.int8, torch.bfloat16),
    ],
)
def test_grids_are_timed_in_what_the_model_computes_in(stored, norms, timed, monkeypatch):
    """Quantised and layerwise-cast weights are stored in another dtype."""
    asked = []
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *shape: asked.append(shape[:2]) or 64)
    unet = hosts.unet()
    for name, weight in unet.named_parameters():
        weight.requires_grad_(False)
        weight.data = weight.data.to(norms if "norm" in name else stored)
    choose(pipeline(unet=unet))
    assert asked == [(torch.device("cpu"), timed)]


def test_grids_are_timed_where_an_offloaded_model_runs(monkeypatch):
    asked = []
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *shape: asked.append(shape[0]) or 64)
    monkeypatch.setattr(calibration, "_key", lambda device, dtype: str(device))  # it need not be there
    choose(pipeline(unet=hosts.unet(), _execution_device=torch.device("cuda:0")))
    assert asked == [torch.device("cuda:0")]


def test_a_measurement_in_which_nothing_gains_is_not_kept(monkeypatch, tmp_path):
    """A machine that is busy for a moment must not keep models dense for ever."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = iter([(2 * calibration.SIDES[-1]) ** 2, 256])
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: next(found))
    device = torch.device("cpu")
    assert [calibration.fewest_tokens(device, torch.float32) for _ in range(3)] == [128**2, 256, 256]


def test_measuring_draws_nothing_from_the_global_generator(monkeypatch):
    monkeypatch.setattr(calibration, "SIDES", (8,))
    before = torch.get_rng_state()
    calibration.measure_fewest_tokens(torch.device("cpu"), torch.float32, 64, 4)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("slow", "expected"), [("merged", 128 * 128), ("dense", 64), ("small", 16 * 16)])
def test_the_fewest_tokens_are_those_from_which_merging_is_faster(slow, expected, monkeypatch):
    """With given times: merged and dense in turn, of the first grid, the second one, and so on."""
    sides = iter([side for side in calibration.SIDES for _ in range(2)])
    turn = iter(range(100))

    def seconds(function: Any, device: torch.device) -> float:
        side, merged = next(sides), next(turn) % 2 == 0
        worse = {"merged": True, "dense": False, "small": side < 16}[slow]
        return 2.0 if merged == worse else 1.0

    monkeypatch.setattr(calibration, "_seconds", seconds)
    assert calibration.measure_fewest_tokens(torch.device("cpu"), torch.float32) == expected


def test_the_fewest_tokens_are_timed_with_all_that_auto_adds_to_a_merged_step(monkeypatch):
    """Sizes in attention, and the correction, which merges what a dense step changed."""
    masks, merges = [], []
    attend, merge = calibration.F.scaled_dot_product_attention, calibration.merge

    def noted(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        masks.append(mask is not None)
        return attend(q, k, v, mask)

    monkeypatch.setattr(calibration.F, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(calibration, "merge", lambda plan, x: merges.append(x) or merge(plan, x))
    monkeypatch.setattr(calibration, "SIDES", (8,))
    monkeypatch.setattr(calibration, "_seconds", lambda function, device: function() is None)
    calibration.measure_fewest_tokens(torch.device("cpu"), torch.float32, 64, 4)
    assert masks == [False, True, False]  # what a dense step changed, merged, dense
    assert len(merges) == 2
    assert not torch.equal(*merges)


def test_it_is_measured_once_for_a_device_and_kept(own_cache, monkeypatch):
    cpu, measured = torch.device("cpu"), []

    def measure(device: torch.device, dtype: torch.dtype, channels: int, heads: int) -> int:
        measured.append((dtype, channels, heads))
        return 64 * len(measured)

    monkeypatch.setattr(calibration, "measure_fewest_tokens", measure)
    for _ in range(2):
        assert calibration.fewest_tokens(cpu, torch.float32) == 64
    assert calibration.fewest_tokens(cpu, torch.bfloat16) == 128
    assert calibration.fewest_tokens(cpu, torch.bfloat16, 64, 4) == 192
    file = own_cache / "tokenmerge" / "fewest_tokens.json"
    assert calibration.cache_file() == file
    assert list(json.loads(file.read_text()).values()) == [64, 128, 192]
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    (key, *_) = json.loads(file.read_text())
    wrong = [json.dumps({key: value}) for value in (-5, 0, True, 64.0, "64", None, [64])]
    for times, text in enumerate(('{"cut off', "[1]", "3", "[" * 100_000, *wrong)):
        file.write_text(text)
        assert calibration.fewest_tokens(cpu, torch.float32) == 256 + 64 * times


def test_a_folder_that_cannot_be_written_is_no_matter(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: 256)
    assert calibration.fewest_tokens(torch.device("cpu"), torch.float32) == 256


@pytest.mark.parametrize("failing", ["home", "disk"])
def test_a_cache_that_fails_is_no_matter_and_leaves_nothing(failing, own_cache, monkeypatch):
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: 256)

    def fail(*_: Any) -> None:
        raise RuntimeError

    def half(file: Path, text: str, **_: Any) -> None:
        file.write_bytes(text[: len(text) // 2].encode())
        raise OSError(28, "No space left on device")

    if failing == "disk":
        monkeypatch.setattr(calibration.Path, "write_text", half)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("LOCALAPPDATA", raising=False)
        monkeypatch.setattr(calibration.Path, "home", fail)
        monkeypatch.setattr(calibration.tempfile, "gettempdir", lambda: str(own_cache))
    assert calibration.fewest_tokens(torch.device("cpu"), torch.float32) == 256
    left = [path.name for path in (own_cache / "tokenmerge").iterdir()]
    assert left == ([] if failing == "disk" else ["fewest_tokens.json"])


@pytest.mark.parametrize("ratio", ["0.6", 0.9, math.nan])
def test_a_ratio_is_checked_before_anything_is_measured(ratio, monkeypatch):
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: pytest.fail("measured"))
    with pytest.raises(ConfigError, match="ratio: expected"):
        choose(hosts.unet(), ratio)


def test_measuring_takes_seconds():
    start = time.process_time()
    sides = {side**2 for side in (*calibration.SIDES, 2 * calibration.SIDES[-1])}
    assert calibration.measure_fewest_tokens(torch.device("cpu"), torch.float32) in sides
    assert time.process_time() - start < 60  # also on a busy machine, since its waiting is not counted


def test_the_narrowest_attention_decides(monkeypatch):
    asked = []
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *shape: asked.append(shape[2:]) or 64)
    unet = hosts.unet()
    choose(pipeline(unet=unet))
    attention = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    assert asked == [(attention.to_q.out_features, attention.heads)]


def test_a_cache_limit_below_step_reuse_is_named_where_nothing_merges(fast):
    """Without step reuse nothing would be left, so the error is about the limit and not about merging."""
    pipe = pipeline(transformer=model_of(FAMILIES["SD3Transformer2DModel"]))
    with pytest.raises(ConfigError, match="max_cache: expected at least"):
        apply_token_merging(pipe, speedup=2.0, max_cache=1)
