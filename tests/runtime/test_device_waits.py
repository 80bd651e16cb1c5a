"""On a device, a generation waits for it in its first two steps alone, also where timesteps are on the CPU.

Unlike test_host_syncs, this sees copies between the device and the CPU: all tensors are on a fake device.
"""

from __future__ import annotations

from typing import Any

import hosts
import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from tests.fake_device import AVAILABLE, DEVICE, FakeDevice, OnDevice, to_device
from tests.models.tiny import FAMILIES

from tokenmerge import Correction, ToMeConfig, apply_token_merging, presets, token_merging

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="this version of PyTorch has no device types made in Python"),
    pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning"),
]

STEPS, SIDE = 8, 16
CORRECTED = ToMeConfig(ratio=0.5, planner="tiled", proportional=True, correction=Correction(every=2))
UNET = {"default": 1.7, "tome": ToMeConfig(ratio=0.5), **{name: name for name in presets.__all__}}
FLUX = {"default": 1.7, "corrected": CORRECTED, "toma": "toma"}


class Loop:
    """A pipeline of a model and a scheduler, which notes how many times each of its steps waited."""

    def __init__(self, model: Any, scheduler: Any) -> None:
        self.scheduler, self.is_unet = scheduler, hasattr(model, "down_blocks")
        setattr(self, "unet" if self.is_unet else "transformer", to_device(model))
        self.do_classifier_free_guidance = self.is_unet
        inputs = FAMILIES["FluxTransformer2DModel"].inputs(1, SIDE, SIDE)
        self.inputs = {name: OnDevice(value) for name, value in inputs.items()}
        self.text = OnDevice(torch.randn(2, 4, 16))
        self.noise = OnDevice(torch.randn(1, 4, SIDE, SIDE)) if self.is_unet else self.inputs["hidden_states"]

    def __call__(self, device: FakeDevice, timesteps_on: Any = DEVICE) -> list[int]:
        self.scheduler.set_timesteps(STEPS, device=DEVICE if timesteps_on is float else timesteps_on)
        waited, latents = [], self.noise
        given = self.scheduler.timesteps.cpu().tolist() if timesteps_on is float else self.scheduler.timesteps
        for t, own in zip(given, self.scheduler.timesteps, strict=True):
            before = device.waits.total()
            if self.is_unet:
                sample = self.scheduler.scale_model_input(torch.cat([latents] * 2), own)
                with_text, without = self.unet(sample, t, self.text, return_dict=False)[0].chunk(2)
                noise = without + 3 * (with_text - without)
            else:
                inputs = {**self.inputs, "hidden_states": latents, "timestep": t.expand(1) / 1000}
                noise = self.transformer(**inputs, return_dict=False)[0]
            latents = self.scheduler.step(noise, own, latents, return_dict=False)[0]
            waited.append(device.waits.total() - before)
        assert isinstance(latents, OnDevice)
        return waited


def merging(loop: Loop, method: Any) -> Any:
    return token_merging(loop, speedup=method) if isinstance(method, float) else token_merging(loop, method)


def unet_loop(scheduler: Any) -> Loop:
    return Loop(hosts.unet(), scheduler)


@pytest.fixture
def device() -> Any:
    with torch.no_grad(), FakeDevice() as device:
        yield device


def test_the_device_is_waited_for_by_copies_and_values(device, monkeypatch):
    monkeypatch.setattr("tests.fake_device.OURS", __file__)
    there, here = torch.ones(3, device=DEVICE), torch.ones(3)
    waits = [
        lambda: there.cpu(),
        lambda: here.to(DEVICE),
        lambda: torch.tensor([1.0, 2.0], device=DEVICE),
        lambda: torch.as_tensor(torch.tensor(2.0), device=DEVICE, dtype=torch.float32),
        lambda: there.copy_(here),
        lambda: here.copy_(there),
        lambda: there.sum().item(),
        lambda: bool((there == there).all()),
        lambda: torch.equal(there, there),
        lambda: there[there > 0],
        lambda: there[torch.tensor([0, 1])],
    ]
    for number, wait in enumerate(waits, 1):
        wait()
        assert device.waits.total() == number, number
    others = [
        lambda: torch.full((), 7, device=DEVICE),
        lambda: there.to(torch.float16),
        lambda: there * torch.tensor(2.0),
        lambda: here.sum().item(),
        lambda: there[torch.zeros(2, dtype=torch.int64, device=DEVICE)],
        lambda: here.cpu(),
    ]
    for other in others:
        other()
        assert device.waits.total() == len(waits)
    with pytest.raises(RuntimeError, match="one device"):
        there + here


@pytest.mark.parametrize("scheduler", [DDIMScheduler, EulerDiscreteScheduler])
@pytest.mark.parametrize("timesteps_on", [DEVICE, "cpu"], ids=str)
def test_a_unet_waits_once_in_each_of_the_first_two_steps(timesteps_on, scheduler, device):
    """They ask whether the prompts share a sample."""
    loop = unet_loop(scheduler())
    apply_token_merging(loop, speedup=1.7)
    for _ in range(2):
        assert loop(device, timesteps_on) == [1, 1, *[0] * (STEPS - 2)], device.waits


def test_timesteps_are_copied_from_the_device_once_in_a_generation(device):
    """Where the model is called with numbers, and the scheduler does not say at which step it is."""
    loop = unet_loop(DDIMScheduler())
    apply_token_merging(loop, speedup=1.7)
    for _ in range(2):
        assert loop(device, float) == [2, 1, *[0] * (STEPS - 2)], device.waits


@pytest.mark.parametrize("method", UNET)
def test_no_method_waits_after_the_second_step(method, device):
    loop = unet_loop(EulerDiscreteScheduler())
    with merging(loop, UNET[method]):
        waited = loop(device)
    assert sum(waited) <= 2, device.waits
    assert not any(waited[2:]), device.waits


@pytest.mark.parametrize("method", FLUX)
def test_a_transformer_waits_twice_as_a_generation_begins(method, device):
    """For the ids of its first image, and for a timestep that is no view of the scheduler's."""
    loop = Loop(FAMILIES["FluxTransformer2DModel"].build(), FlowMatchEulerDiscreteScheduler())
    with merging(loop, FLUX[method]):
        for ids in (1, 0):
            assert loop(device) == [ids + 1, *[0] * (STEPS - 1)], device.waits


def test_prompts_in_calls_of_their_own_wait_no_more(device):
    """Two calls with one timestep on the CPU: their steps are compared by value, without the device.

    Each has the same text in all steps, as pipelines give it.
    """
    unet, texts = to_device(hosts.unet()), [OnDevice(torch.randn(1, 4, 16)) for _ in range(2)]
    patch = apply_token_merging(unet, CORRECTED)
    before = device.waits.total()
    for i, t in enumerate(torch.linspace(900, 10, 4).tolist()):
        patch.at_step(i, 4)
        sample = OnDevice(torch.randn(1, 4, SIDE, SIDE))
        for text in texts:
            unet(sample, t, text)
    assert device.waits.total() == before, device.waits
