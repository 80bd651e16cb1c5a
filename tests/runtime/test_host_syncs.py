"""On an accelerator no call of a model waits for it: nothing that merging does looks at a value of a tensor.

Found by the operations that hand values to Python, or whose result has a shape that follows from values: they
are the same on the CPU.
"""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline
from tests.runtime.test_steps_in_pipelines import OF_KINDS, draw
from torch.utils._python_dispatch import TorchDispatchMode

import tokenmerge
from tokenmerge import Correction, StepReuse, ToMeConfig, apply_token_merging, presets
from tokenmerge.runtime.patching import call_facts, guidance
from tokenmerge.runtime.steps import step_tracker
from tokenmerge.runtime.steps.step_tracker import step_seed

pytestmark = pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning")

OURS = str(Path(tokenmerge.__file__).parent)
WAITING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "unique_dim", "_unique2", "bincount"}
METHODS = {
    "auto": ToMeConfig(
        ratio=0.5,
        planner="tiled",
        proportional=True,
        correction=Correction(every=2),
        reuse=StepReuse(every=2),
        max_downsample=2,
    ),
    "tome": ToMeConfig(ratio=0.5),
    **{name: getattr(presets, name)() for name in presets.__all__},
}
# The default method's with every scheduler, the others with one of them each.
PAIRS = [
    (name, scheduler)
    for i, name in enumerate(METHODS)
    for j, scheduler in enumerate(OF_KINDS)
    if name == "auto" or i % len(OF_KINDS) == j
]


class Waits(TorchDispatchMode):
    """Counts operations that an accelerator would be waited for, by the line of ours that asked."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in WAITING or by_mask:
            frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename]
            if frames[-2].filename.startswith(OURS):  # the last one is this
                self.found[f"{name} at {frames[-2].filename}:{frames[-2].lineno}"] += 1
        return function(*args, **(kwargs or {}))


def waits(pipe: StableDiffusionPipeline, config: ToMeConfig) -> tuple[Counter[str], torch.Tensor]:
    with tokenmerge.token_merging(pipe, config), Waits() as waits:
        latents = draw(pipe, 6)
    return waits.found, latents


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if tensors were on one."""
    for module in (call_facts, guidance, step_tracker):
        monkeypatch.setattr(module, "needs_sync", lambda value: True)


@pytest.mark.parametrize(("name", "scheduler"), PAIRS)
def test_no_call_waits(name, scheduler, pipe, monkeypatch, request):
    """But the first two of a generation whose steps are followed: they ask whether prompts share a sample."""
    pipe.scheduler, config = scheduler, METHODS[name]
    _, looked_at = waits(pipe, config)
    request.getfixturevalue("accelerator")
    found, latents = waits(pipe, config)
    assert sum(found.values()) == (2 if config.follows_steps and config.merge_sharing.guidance else 0)
    assert torch.equal(latents, looked_at)


def asked_for_copies(found: Counter[str]) -> int:
    """How often it was asked whether prompts share a sample."""
    return sum(count for line, count in found.items() if "/guidance.py" in line)


def test_values_that_are_looked_at_are_found(pipe):
    """On a CPU, where it costs nothing, each call asks."""
    found, _ = waits(pipe, METHODS["auto"])
    assert asked_for_copies(found) == 6
    assert sum(found.values()) > 6  # samples are compared with those of the step before


def test_a_larger_batch_is_asked_again(pipe, accelerator):
    """Beside that, samples are compared, which a callback may have moved."""
    config = METHODS["auto"]

    def half(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 3:
            tensors["latents"] = tensors["latents"][..., :8].contiguous()
        return tensors

    with tokenmerge.token_merging(pipe, config), Waits() as found:
        draw(pipe, 8, callback_on_step_end=half)
    assert asked_for_copies(found.found) == 4


def test_two_calls_with_one_timestep_have_one_number(accelerator):
    cpu, timestep = torch.device("cpu"), torch.tensor(7.0)
    first = step_seed(timestep, cpu, {})
    assert step_seed(timestep, cpu, {}) is first
    timestep += 1
    changed = step_seed(timestep, cpu, {})
    assert changed != first
    assert step_seed(torch.tensor(8.0), cpu, {}) == changed
    assert step_seed(8.0, cpu, {}) == changed
    with torch.inference_mode():
        timestep = torch.tensor(7.0)
        assert step_seed(timestep, cpu, {}) == first
        timestep += 1  # of which nothing tells
        assert step_seed(timestep, cpu, {}) == changed


def test_a_second_call_of_a_step_compares_no_numbers(pipe, accelerator):
    """Prompts in calls of their own, on one sample and with one timestep, as video pipelines make them."""
    apply_token_merging(pipe, METHODS["auto"])
    pipe.scheduler.set_timesteps(3)
    text = torch.randn(1, 4, 16)
    with torch.no_grad(), Waits() as waits:
        for t in pipe.scheduler.timesteps:
            sample = torch.randn(1, 4, 16, 16)
            for _ in range(2):
                pipe.unet(sample, t, text)
    assert not waits.found
