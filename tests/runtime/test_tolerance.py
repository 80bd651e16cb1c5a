"""A tolerance runs more steps than planned where the estimate demands it, up to the dense image."""

from __future__ import annotations

import itertools
import math
import re
import threading
import warnings
from collections.abc import Mapping
from typing import Any

import hosts
import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from tests.fake_device import AVAILABLE, FakeDevice
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES
from tests.runtime.test_device_waits import STEPS, unet_loop
from torch import Tensor
from torch.torch_version import TorchVersion

from tokenmerge import ConfigError, ToMeConfig, ViTConfig, apply_token_merging
from tokenmerge.config import read_metadata, save_config
from tokenmerge.plans.generation import StepKind
from tokenmerge.runtime.memory.run_log import ForecastError, RunLog, observations_of
from tokenmerge.runtime.patching.patch import state_of

SPEEDUP, HIGHEST = 1.5, 100
# PyTorch 2.7 does not repeat the message of an exception in a graph.
IN_ONE_GRAPH = (
    "Observed exception" if TorchVersion(torch.__version__) < (2, 8) else "cannot be compiled into one graph"
)
TOLERANCES = (1, 25, 28, 30, 32, 35, HIGHEST)
OF_FLUX = (1, 40, 48, 52, 56, 60, HIGHEST)  # whose errors are smaller, and are made good


class Unet:
    """A pipeline of a tiny UNet."""

    do_classifier_free_guidance, guidance_scale = True, 3.0

    def __init__(self) -> None:
        self.scheduler, self.unet = DDIMScheduler(), hosts.unet()

    def __call__(self, seeds: tuple[int, ...] = (0,), size: float = 1.0) -> Tensor:
        """Return the latents for these seeds; ``size``: of the text of all but the first."""
        latents = torch.stack([torch.randn(4, 16, 16, generator=at(seed)) for seed in seeds])
        text = torch.cat([torch.randn(1, 4, 16, generator=at(seed)) for seed in (*seeds, *seeds)])
        text[1 : len(seeds)] *= size
        self.scheduler.set_timesteps(12)
        with torch.no_grad():
            for t in self.scheduler.timesteps:
                both = self.unet(torch.cat([latents] * 2), t, text, return_dict=False)[0]
                without, with_text = both.chunk(2)
                noise = without + self.guidance_scale * (with_text - without)
                latents = self.scheduler.step(noise, t, latents, return_dict=False)[0]
        return latents


class Flux:
    """A pipeline of a tiny transformer, without classifier-free guidance."""

    do_classifier_free_guidance = False

    def __init__(self) -> None:
        self.family = FAMILIES["FluxTransformer2DModel"]
        self.scheduler, self.transformer = FlowMatchEulerDiscreteScheduler(), model_of(self.family)

    def __call__(self) -> Tensor:
        inputs = self.family.inputs(1, 8, 8)
        latents = inputs["hidden_states"]
        self.scheduler.set_timesteps(12)
        for t in self.scheduler.timesteps:
            arguments = {**inputs, "hidden_states": latents, "timestep": t.expand(1) / 1000}
            latents = self.scheduler.step(call(self.transformer, arguments), t, latents, return_dict=False)[0]
        return latents


def at(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def last_run(pipe: Any) -> Any:
    return state_of(getattr(pipe, "unet", None) or pipe.transformer).last_run


def full_steps(pipe: Any) -> int:
    run = last_run(pipe)
    return len(run.config.reuse.steps_of(run.steps).full)


@pytest.mark.filterwarnings("ignore:min_psnr=.* is dense")
@pytest.mark.parametrize(("kind", "tolerances"), [(Unet, TOLERANCES), (Flux, OF_FLUX)])
def test_from_the_plan_of_the_speedup_to_the_dense_picture(kind, tolerances):
    pipe = kind()
    dense = pipe()
    with apply(pipe, None):
        plan, planned = pipe(), full_steps(pipe)
    runs = {}
    for tolerance in tolerances:
        with apply(pipe, tolerance):
            runs[tolerance] = pipe(), full_steps(pipe)
            assert last_run(pipe).kinds[StepKind.SHALLOW] <= 12 - planned
    assert torch.equal(runs[1][0], plan)
    assert torch.equal(runs[HIGHEST][0], dense)
    counts = [count for _, count in runs.values()]
    # What a step runs depends on the ones before it, so a higher tolerance can need one full step less.
    assert all(later >= earlier - 1 for earlier, later in itertools.pairwise(counts))
    assert counts[0] == planned
    assert len(set(counts)) > 2
    errors = [(picture - dense).norm().item() for picture, _ in runs.values()]
    assert errors[0] > errors[-1] == 0


class apply:
    """Token merging with a tolerance within the context."""

    def __init__(self, pipe: Any, min_psnr: float | None, speedup: float = SPEEDUP) -> None:
        self.patch = apply_token_merging(pipe, speedup=speedup, min_psnr=min_psnr)

    def __enter__(self) -> Any:
        return self.patch

    def __exit__(self, *_: object) -> None:
        self.patch.remove()


def test_a_picture_depends_on_its_seed_alone():
    pipe = Unet()
    with apply(pipe, 30):
        first = pipe()
        pipe((1,))
        assert torch.equal(pipe(), first)
    with apply(pipe, 30):
        assert torch.equal(pipe(), first)


def test_of_a_batch_the_largest_errors_count():
    def largest(*errors: float) -> Mapping[str, Mapping[int, float]]:
        log = RunLog(ToMeConfig(), len(errors), (), 1, 12)
        log.errors = [ForecastError(3, "deep", 2, torch.tensor(errors))]
        return observations_of([log]).errors

    assert largest(0.25, 0.5, 0.125) == {"deep": {3: 0.5}}
    assert math.isnan(largest(0.25, math.nan)["deep"][3])


def test_the_summary_says_what_a_tolerance_cost():
    pipe = Unet()
    with apply(pipe, 30) as patch:
        pipe((0, 1))
        found, above = str(patch), patch.estimate.psnr >= 30
    reached = "above" if above else "below"
    due = f"the estimate is {reached} 30 dB; the plan aims at 36 dB, to be safe"
    counted, cost, fixed = map(float, re.findall(r"(\d\.\d\d)×", found))
    assert f"min_psnr 30: {due}. This cost speed: {cost:.2f}× in place of {fixed:.2f}×" in found
    assert counted == cost < fixed


def test_of_a_run_that_skipped_nothing_the_summary_says_that_its_picture_is_the_dense_one():
    pipe = Unet()
    with apply(pipe, 100) as patch:
        with pytest.warns(
            UserWarning, match="min_psnr=100: no plan is so close, so this generation is dense"
        ):
            pipe((0, 1))
        assert "closeness to dense: the dense image itself: nothing was skipped or merged\n" in str(patch)
        assert math.isinf(patch.estimate.psnr)


@pytest.mark.parametrize(("kind", "clean"), [(Unet, False), (Flux, True)])
def test_the_handle_knows_whether_the_schedule_of_the_run_ended_clean(kind, clean):
    """So it counts and estimates the plan that ran: a last step without noise costs nothing."""
    pipe = kind()
    with apply(pipe, None) as patch:
        pipe()
        assert last_run(pipe).schedule.ends_clean is clean
        assert patch._facts_at(None, None, 12).schedule.ends_clean is clean


def test_prompts_in_calls_of_their_own_follow_one_decision():
    """Each step is decided once, also where its second call comes after the errors of the first one."""
    pipe = Unet()
    with apply(pipe, 30) as patch, torch.no_grad():
        kinds = []
        for index in range(12):
            patch.at_step(index, 12)
            first, other = (torch.randn(1, 4, 16, 16, generator=at(seed)) for seed in (0, 1))
            sample = first + 0.2 * index * other  # as a scheduler moves it
            decided = []
            for seed in (1, 2):
                pipe.unet(sample, 1000 - index, torch.randn(1, 4, 16, generator=at(seed)))
                decided.append(state_of(pipe.unet).context.decision.kind)
            assert decided[0] is decided[1]
            kinds.append(decided[0])
    assert len(set(kinds)) > 1


def test_threads_have_tolerances_of_their_own():
    pipe, alone, together = Unet(), {}, {}

    def run(seed: int, results: dict[int, Tensor]) -> None:
        latents = torch.randn(1, 4, 16, 16, generator=at(seed)) * (1 + 3 * seed)
        with torch.no_grad():
            for index in range(12):
                patch.at_step(index, 12)
                text = torch.randn(2, 4, 16, generator=at(seed))
                both = pipe.unet(torch.cat([latents] * 2), 1000 - 80 * index, text, return_dict=False)[0]
                latents = latents - 0.1 * both.mean(0, keepdim=True)
        results[seed] = latents

    with apply(pipe, 30) as patch:
        for seed in (0, 1):
            run(seed, alone)
        threads = [threading.Thread(target=run, args=(seed, together)) for seed in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for seed, latents in alone.items():
        assert torch.equal(together[seed], latents)


@pytest.mark.skipif(not AVAILABLE, reason="this version of PyTorch has no device types made in Python")
@pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning")
def test_a_tolerance_waits_at_most_once_after_each_complete_step():
    with torch.no_grad(), FakeDevice() as device:
        loop = unet_loop(EulerDiscreteScheduler())
        apply_token_merging(loop, speedup=1.7, min_psnr=20)
        waited = loop(device)
        run = last_run(loop)
        full = run.config.reuse.steps_of(STEPS).full
    assert 2 < len(full) < STEPS
    assert all(waited[step] <= (step - 1 in full) for step in range(2, STEPS)), (waited, full)
    assert any(waited[2:])


def test_blocks_may_be_compiled_and_a_whole_model_is_refused():
    plain, compiled = Flux(), Flux()
    with apply(plain, 25):
        expected = plain()
    compiled.transformer.load_state_dict(plain.transformer.state_dict())
    with apply(compiled, 25):
        compiled.transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
        assert torch.equal(compiled(), expected)
        whole = torch.compile(compiled.transformer, fullgraph=True, backend="eager")
        with pytest.raises(Exception, match=IN_ONE_GRAPH):
            call(whole, compiled.family.inputs(1, 8, 8))


@pytest.mark.parametrize("value", [True, "35", float("nan"), float("inf"), 0, -3, 101])
def test_other_values_are_refused(value):
    pipe = Unet()
    with pytest.raises(ConfigError, match="min_psnr: expected a PSNR in dB from 1 to 100, such as 30, got"):
        apply_token_merging(pipe, speedup=2.0, min_psnr=value)
    assert state_of(pipe.unet) is None


@pytest.mark.parametrize(
    ("config", "ratio"), [(None, 0.5), (ToMeConfig(), None), ("toma", None), ("toma", 0.5), ("a.json", None)]
)
def test_only_the_default_method_has_steps_to_spend(config, ratio, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_config(ToMeConfig(), "a.json")
    with pytest.raises(ConfigError, match=r"min_psnr: only the default .* speedup=2.0, min_psnr=35\)"):
        apply_token_merging(Unet(), config, ratio=ratio, min_psnr=35)


def test_a_model_alone_and_a_vision_transformer_are_refused():
    with pytest.raises(ConfigError, match=r"min_psnr: a model alone .* apply token merging to the pipeline"):
        apply_token_merging(hosts.unet(), speedup=2.0, min_psnr=35)
    with pytest.raises(ConfigError):
        apply_token_merging(hosts.unet(), ViTConfig(r=8), min_psnr=35)  # type: ignore[call-overload]


def test_metadata_give_the_same_picture():
    pipe = Unet()
    with apply(pipe, 30) as patch:
        picture, line = pipe(), patch.metadata()
    assert line.startswith("Token merging: speedup=1.5, min_psnr=30, {")
    patch = apply_token_merging(pipe, read_metadata(line))
    assert torch.equal(pipe(), picture)
    patch.remove()


def test_a_tolerance_that_asks_for_little_costs_nothing():
    pipe = Unet()
    with apply(pipe, 1) as patch:
        pipe((0, 1))
        assert "; the plan aims at 7 dB, to be safe. No step was added\n" in str(patch)


@pytest.mark.parametrize("kind", [Unet, Flux])
@pytest.mark.parametrize("speedup", [1, 1.0, 1.001, 1.01])
def test_a_tolerance_at_hardly_any_speed(kind, speedup):
    """Also where the last step could be skipped for nothing, so that no plan is as slow as that."""
    pipe = kind()
    dense = pipe()
    with apply(pipe, 30, speedup) as patch, warnings.catch_warnings():
        warnings.simplefilter("error" if speedup == 1 else "ignore")
        picture = pipe()
        assert str(patch)
    if speedup == 1:
        assert torch.equal(picture, dense)
