"""What is made good reaches the sample unchanged, in each pipeline of flow matching without guidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.runtime.combinations.test_batches import CASES, STEPS, Case, flow
from torch import Tensor

from tokenmerge import StepReuse, ToMeConfig, apply_token_merging
from tokenmerge.runtime.patching import call_context
from tokenmerge.runtime.steps.making_good import weights

FULL = (0, 1, *range(3, STEPS, 2))
REUSE = ToMeConfig(ratio=0.0, reuse=StepReuse(full_steps=tuple(step / (STEPS - 1) for step in FULL)))
# From image to image, a generation has fewer steps.
FLOW = [
    case
    for case in CASES
    if case.scheduler is flow and case.off is not None and "Img2Img" not in case.pipeline
]
# They do not tell in a run that they draw without guidance.
UNTOLD = {
    *("AuraFlowPipeline", "Flux2Pipeline", "Kandinsky5T2IPipeline", "Kandinsky5T2VPipeline"),
    *("OvisImagePipeline", "QwenImageControlNetPipeline", "QwenImagePipeline"),
}


class Steps:
    """The steps of a scheduler. With ``mends``, each full one makes good here what those before it missed."""

    def __init__(self, scheduler: Any, mends: bool) -> None:
        self._step = scheduler.step
        self._scheduler = scheduler
        self._mends = mends
        self._outputs: dict[int, Tensor] = {}
        scheduler.step = self.step

    def step(self, output: Tensor, timestep: Any, *given: Any, **more: Any) -> Any:
        if self._scheduler.step_index is None:
            self._scheduler._init_step_index(timestep)
        index = self._scheduler.step_index - (self._scheduler.begin_index or 0)
        self._outputs[index] = output.double()
        if self._mends and index in FULL and index - 1 not in FULL and index:
            nodes = [full for full in FULL if full <= index][-3:]
            skipped = range(nodes[-2] + 1, index)
            output = (self._outputs[index] + self._missed(nodes, skipped)).to(output.dtype)
        return self._step(output, timestep, *given, **more)

    def _missed(self, nodes: Sequence[int], skipped: Sequence[int]) -> Tensor:
        changes = self._scheduler.sigmas.double().diff()[self._scheduler.begin_index or 0 :]
        missed = torch.zeros(())
        for step in skipped:
            truth = sum(weight * self._outputs[node] for node, weight in weights(step, nodes).items())
            missed = missed + changes[step] / changes[nodes[-1]] * (truth - self._outputs[step])
        return missed


def drawn(case: Case, mends: bool) -> Tensor:
    pipe = case.build()
    apply_token_merging(pipe, REUSE)
    Steps(pipe.scheduler, mends)
    return case.draw(pipe, 1, guides=False).double()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", FLOW, ids=lambda case: case.pipeline + case.version)
@torch.no_grad()
def test_the_image_is_as_if_the_scheduler_made_it_good(case, monkeypatch):
    made_good = drawn(case, mends=False)
    monkeypatch.setattr(call_context, "_sigmas_to_make_good", lambda *_: None)
    plain = drawn(case, mends=False)
    if case.pipeline in UNTOLD:
        assert torch.equal(made_good, plain)
        return
    mended = drawn(case, mends=True)
    changed = (mended - plain).abs().max()
    assert changed > 0
    torch.testing.assert_close(made_good, mended, rtol=0, atol=float(changed) * 1e-3 + 1e-6)
