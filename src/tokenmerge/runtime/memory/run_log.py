"""What happened in the latest generation of a patched model, for its handle to tell."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tokenmerge.config import ToMeConfig
from tokenmerge.ops.partition import num_tokens
from tokenmerge.plans.estimate import Shown, noise_of
from tokenmerge.runtime.memory.reuse import Residual
from tokenmerge.runtime.steps.scheduler import NoiseLevels
from tokenmerge.runtime.steps.step_tracker import Decision, StepTracker

_TINY = torch.finfo(torch.float32).tiny

# "merged": the whole model runs, and tokens merge. "unmerged": it runs, and no token merges. Both are
# complete steps. "reused": a part of the model is skipped.
StepKind = Literal["merged", "unmerged", "reused"]


class ForecastError(NamedTuple):
    """How wrong a forecast of step reuse would have been, in a step that ran the part.

    The part is ``"deep"`` for blocks and deep stages, ``"finest"`` for the finest level of a UNet. It ran
    ``gap`` steps before. The error is that of the picture that the model predicts in the step, in the unit
    of the latents, for each image, float32.
    """

    step: int
    part: str
    gap: int
    error: Tensor


class AddedNoise:
    """How much noise a solver adds, measured once in a generation, from two steps without a setting of it.

    A step keeps a share of the noise in its sample: that of the noise levels where the solver adds none. The
    share ``kept`` is None until it is measured, in a step with these ``levels`` before and after it. The next
    step is compared with ``before``: index, sample and picture.
    """

    def __init__(self) -> None:
        self.kept: Tensor | None = None
        self.levels = 1.0, 1.0
        self.before: tuple[int, Tensor, Tensor] | None = None

    def note(self, levels: NoiseLevels, sample: Tensor, picture: Tensor, index: int) -> None:
        """Note the sample that the model gets in a step, and the picture that it predicts from it."""
        before, self.before = self.before, None
        if self.kept is not None:
            return
        sample = levels.scaled(sample, index)
        if before is not None and before[0] == index - 1 and before[1].shape == sample.shape:
            noise = (before[1] - before[2]).flatten()
            self.kept = torch.dot(noise, (sample - before[2]).flatten()) / noise.square().sum()
            self.levels = levels.sigmas[index - 1], levels.sigmas[index]
        elif index and 0 < levels.sigmas[index + 1] < levels.sigmas[index]:
            self.before = index, sample, picture


class RunLog:
    """What happened in one generation so far. Noting it does not wait for the device.

    Attributes:
        guidance: scale of classifier-free guidance; None: unknown.
        batch: batch size of a call of the model.
        height, width: of the sample (for latent diffusion, of the latents); None: nothing reads them.
        references: height and width of each reference picture in the sequence of the sample.
        tokens: number of tokens at the finest level, over all frames of a video and all references.
        steps: number of denoising steps of the generation; None: unknown.
        levels: its noise levels; None: unknown.
        sample: of the running call; None: it is no tensor.
        missed: of the running call: part, steps since it ran, and the length of the forecast's error divided
            by that of the part's change, for each image.
        outputs: of the model, by call in its step and part: when the part last ran.
        kind_of_step: what each step did, or its last call; empty if the settings do not follow the steps.
        seconds: from the first call of the model to the end of the last one. On an accelerator, the last
            operations may still run then.
    """

    def __init__(
        self,
        config: ToMeConfig,
        batch: int,
        grids: tuple[tuple[int, int, int], ...],
        patch: int,
        steps: int | None,
        guidance: float | None = None,
        levels: NoiseLevels | None = None,
    ) -> None:
        self.config, self.batch, self.steps = config, batch, steps
        self.guidance, self.levels = guidance, levels
        sizes = [(rows * patch, columns * patch) for _, rows, columns in grids]
        size: tuple[int | None, int | None] = sizes[0] if sizes else (None, None)
        self.height, self.width = size
        self.references = tuple(sizes[1:])
        self.tokens = sum(map(num_tokens, grids))
        self.sample: Tensor | None = None
        self.missed: list[tuple[str, int, Tensor]] = []
        self.outputs: dict[tuple[int, str], Tensor] = {}
        self.errors: list[ForecastError] = []
        self.noise = AddedNoise()
        self.kind_of_step: dict[int, StepKind] = {}
        self.seconds, self._began = 0.0, time.perf_counter()

    def note_end(self) -> None:
        """Note the time at the end of a call."""
        self.seconds = time.perf_counter() - self._began

    def note_forecast(
        self, decision: Decision, copies: int, part: str, before: Residual | None, truth: Tensor
    ) -> None:
        """Compare what a part has added to the image with the forecast that ``before`` makes of it.

        What a forecast misses of a part's change, it is taken to miss of the change of the model's output.
        What that changes in the picture that the model predicts follows from the noise level. So errors of
        all parts have one unit: that of the latents.
        """
        known = decision.forecasts.get(part)
        if known is None or before is None:
            return
        first, delta, agreement = (tensors[0] for tensors in before)
        if truth.shape != first.shape:
            return
        change = truth - first
        error = torch.addcmul(change, delta, agreement * known[0], value=-1)  # as `extrapolated` forecasts it
        error, change = (_length(_guided(own, self.guidance, copies)) for own in (error, change))
        self.missed.append((part, known[1], error / change.clamp(min=_TINY)))

    def note_output(self, decision: Decision, copies: int, tracker: StepTracker, result: Any) -> None:
        """Compare the model's result with those of earlier steps."""
        missed, self.missed = self.missed, []
        sample, self.sample = self.sample, None
        output = result if isinstance(result, Tensor) else result[0]
        if sample is None or not isinstance(output, Tensor) or sample.ndim != output.ndim:
            return  # such as a sample of token ids
        if self.noise.kept is not None and decision.deep is not None and decision.finest is not None:
            return  # a step that skips all parts
        sample, output = sample.detach().chunk(copies)[0], _guided(output.detach(), self.guidance, copies)
        for axis, size in enumerate(output.shape):  # some models get more than the sample, or return more
            sample = sample.narrow(axis, 0, min(size, sample.shape[axis]))
            output = output.narrow(axis, 0, sample.shape[axis])
        index, levels, weight = tracker.index, self.levels, 1.0
        if levels is not None:
            weight = levels.weight(index)
            if tracker.call == 0 and self.noise.kept is None:
                self.noise.note(levels, sample, levels.picture(sample, output, index), index)
        for part, gap, error in missed:
            before = self.outputs.get((tracker.call, part))
            if before is not None and before.shape == output.shape:
                change = _length(output - before) * (weight / output[0].numel() ** 0.5)
                self.errors.append(ForecastError(tracker.done, part, gap, error * change))
        for part, skipped in (("deep", decision.deep), ("finest", decision.finest)):
            if skipped is None:
                self.outputs[tracker.call, part] = output
        if tracker.is_last:  # nothing will be compared with it
            self.outputs = {key: output for key, output in self.outputs.items() if key[0] != tracker.call}
            self.noise.before = None

    @property
    def kinds(self) -> Counter[StepKind]:
        """How many steps of each kind ran."""
        return Counter(self.kind_of_step.values())


def shown(logs: Sequence[RunLog]) -> Shown:
    """Return what the logs of a generation show of its error. Of a batch, the largest errors count.

    This waits for the device once.
    """
    errors = [error for log in logs for error in log.errors]
    measured = next((log.noise for log in logs if log.noise.kept is not None), None)
    tensors = [error.error.max() for error in errors]
    if measured is not None and measured.kept is not None:
        tensors.append(measured.kept)
    values = torch.stack([one.to(tensors[0].device) for one in tensors]).cpu().tolist() if tensors else []
    noise = 1.0 if measured is None else noise_of(values.pop(), *measured.levels)
    found: dict[str, dict[int, float]] = {}
    for one, error in zip(errors, values, strict=True):
        of_part = found.setdefault(one.part, {})
        before = of_part.get(one.step, error)
        of_part[one.step] = before if math.isnan(before) else max(error, before)
    levels = next((log.levels.sigmas for log in logs if log.levels is not None), ())
    steps = next((log.steps for log in logs if log.steps is not None), 0)
    return Shown(found, levels[-steps - 1 :], noise)


def _length(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor.flatten(1), dim=1, dtype=torch.float32)


def _guided(tensor: Tensor, scale: float | None, copies: int) -> Tensor:
    """Return a tensor as classifier-free guidance combines it, if its batch holds both parts."""
    if copies < 2 or scale is None:
        return tensor
    unguided, guided, *_ = tensor.chunk(copies)
    return torch.lerp(unguided, guided, scale)


def in_kinds(kinds: Counter[StepKind]) -> str:
    """Return how many steps were complete and reused, in words.

    >>> in_kinds(Counter(["unmerged", "merged", "reused"]))
    '2 complete, 1 of them unmerged, 1 reused'
    """
    complete = f"{kinds['merged'] + kinds['unmerged']} complete"
    if kinds["unmerged"]:
        complete += f", {kinds['unmerged']} of them unmerged" if kinds["merged"] else ", none merged"
    return f"{complete}, {kinds['reused']} reused"
