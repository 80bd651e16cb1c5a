"""Makes good what forecasts missed, in the next full step, as a corrector of a numerical method does.

With Euler's method a scheduler adds the model's output v to the sample x, times a step h of the noise level:
x ← x + h v. In a skipped step k a forecast f takes the place of v. After the next full step n, the parabola
through the outputs of this step and of the two full steps before it tells what v would have been. So the
output of step n becomes

    v_n + Σ (h_k / h_n) (parabola(k) − f_k),

where k runs over the steps that were skipped since the last full one. That is a predictor–corrector method
whose corrector waits for the next full step: it calls the model no more often. Under classifier-free guidance
the model itself turns back much of what a forecast missed, so nothing is made good there
(benchmarks/making_good_cpu.jsonl). Source: this project.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

_KEPT = 2  # full steps, which make a parabola with the next one


@dataclasses.dataclass(eq=False)
class Outputs:
    """What one call of a model returned in the latest steps of a generation, by step."""

    full: dict[int, list[Tensor]] = dataclasses.field(default_factory=dict)  # of the last full steps
    skipped: dict[int, list[Tensor]] = dataclasses.field(default_factory=dict)  # since the last of these

    def note(self, step: int, runs: bool, result: Any, sigmas: Tensor) -> Any:
        """Note what the model returned in a step, and return its result with what was missed made good.

        ``runs`` says whether the step is full. ``sigmas`` ``[steps + 1]`` are the noise levels of the steps,
        and the last one is that of the image.
        """
        outputs = _outputs_in(result)
        if not runs:
            self.skipped[step] = _copied(outputs)
            return result
        missed = self._missed(step, outputs, sigmas) if self.full and self.skipped else None
        latest = sorted(self.full)[1 - _KEPT :]
        self.full = {**{place: self.full[place] for place in latest}, step: _copied(outputs)}
        self.skipped = {}
        if missed is None:
            return result
        return _with_outputs(result, [one + more for one, more in zip(outputs, missed, strict=True)])

    def _missed(self, step: int, outputs: Sequence[Tensor], sigmas: Tensor) -> list[Tensor] | None:
        """Return what skipped steps missed, as a change of the output of a full step.

        It is None if a step returned something of another shape.
        """
        known = {**self.full, step: outputs}
        shapes = [one.shape for one in outputs]
        if any([one.shape for one in own] != shapes for own in (*known.values(), *self.skipped.values())):
            return None
        changes = sigmas.diff()
        missed: list[Tensor] = []
        for place in range(len(outputs)):
            total: Tensor | None = None
            for skipped, forecasts in self.skipped.items():
                # This is a tensor, so that the device is not waited for. In a step of no length, nothing
                # can be made good.
                length = torch.nan_to_num(changes[skipped] / changes[step], posinf=0.0, neginf=0.0)
                dtype = torch.promote_types(outputs[place].dtype, torch.float32)
                found = -forecasts[place].to(dtype)
                for other, weight in weights(skipped, sorted(known)).items():
                    found = torch.add(found, known[other][place].to(found.device), alpha=weight)
                found = found * length.to(found.device)
                total = found if total is None else total + found
            assert total is not None
            missed.append(total.to(outputs[place].dtype))
        return missed


def weights(place: float, nodes: Sequence[int]) -> Mapping[int, float]:
    """Return the weights of values at ``nodes`` in the polynomial through them at a place (Lagrange).

    >>> weights(1, [0, 2])
    {0: 0.5, 2: 0.5}
    >>> weights(3, [0, 2, 4])
    {0: -0.125, 2: 0.75, 4: 0.375}
    """
    found = {}
    for node in nodes:
        weight = 1.0
        for other in nodes:
            if other != node:
                weight *= (place - other) / (node - other)
        found[node] = weight
    return found


def _outputs_in(result: Any) -> list[Tensor]:
    """Return the tensors that a model returns for the scheduler: one, or one for each image."""
    first = result if isinstance(result, Tensor) else result[0]
    return [leaf for leaf in tree_leaves(first) if isinstance(leaf, Tensor)]


def _copied(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return copies, since a CUDA graph writes its next result over this one, and a host may change it."""
    return [output.detach().clone() for output in outputs]


def _with_outputs(result: Any, outputs: Sequence[Tensor]) -> Any:
    """Return a result with other tensors in the place of those of :func:`_outputs_in`, its first ones."""
    leaves, structure = tree_flatten(result)
    return tree_unflatten([*outputs, *leaves[len(outputs) :]], structure)
