"""Planners: functions that choose which tokens merge. One planner per file, named after it.

A file ``x.py`` here has the function ``plan_x``; nothing else registers it. It plans one part of a token
grid, which is a frame, or a whole video where cells reach over time:

``plan_x(features, grid, r, settings, step) -> Plan``, with

- ``features`` ``[b, n, c]``: what is compared, the input of the block;
- ``grid``: (rows, columns) of the n tokens, or (frames, rows, columns);
- ``r``: the number of tokens to remove, 1 ≤ r < n;
- ``settings``: strides, seed and other knobs of :class:`tokenmerge.ToMeConfig`;
- ``step``: integer tensor of no dimensions that differs between denoising steps; random draws depend on it.

Planners in the folder ``guided`` get one more argument, ``importance`` ``[b, n]``: how much guidance changed
each token in the last step. Those in the folder ``by_result`` get ``scores`` ``[b, n]``: how well each token
can be skipped, by the model's result in the last step. What else is particular to a planner is a line in its
file, such as ``OWN_NUMBER = True``: see :mod:`tokenmerge.config.planner_names`. Files without such a function
hold no planner: ``calibration`` times merging, and those with an underscore are shared by planners.

May import ``ops``, ``config`` and ``errors``; knows nothing of models.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tokenmerge.config import GUIDED_PLANNERS, RESULT_PLANNERS, MergeSettings
from tokenmerge.config import PLANNERS as NAMES
from tokenmerge.ops import Plan, num_tokens
from tokenmerge.planners._grid import num_removed, split
from tokenmerge.planners._parts import part_bounds, pictures_of_part
from tokenmerge.planners._pictures import (
    Pictures,
    num_removed_in_all,
    num_tokens_in_all,
    pictures_of,
    plan_pictures,
)
from tokenmerge.planners._sequence import TokenSequence, sequence_of

__all__ = [
    "PLANNERS",
    "Pictures",
    "TokenSequence",
    "num_removed",
    "num_removed_in_all",
    "num_tokens_in_all",
    "part_bounds",
    "pictures_of",
    "pictures_of_part",
    "plan_pictures",
    "sequence_of",
]

Planner = Callable[..., Plan | None]


def _on_whole_grids(plan_part: Callable[..., Plan]) -> Planner:
    """A planner for whole grids from one for a single part.

    It takes ``(features [b, n, c], (frames, rows, columns), settings, step)``, and ``importance`` ``[b, n]``
    where the planner looks at it. It returns None where no token would be removed.
    """

    @torch.no_grad()
    def plan(
        features: Tensor, grid: Sequence[int], settings: MergeSettings, step: Tensor, *importance: Tensor
    ) -> Plan | None:
        r = num_removed(grid, settings)
        if r == 0:
            return None
        parts, part = split(grid, settings)
        n = num_tokens(part)
        features = features.reshape(-1, n, features.shape[-1])
        of_parts = [values.reshape(-1, n) for values in importance]
        return plan_part(features, part, r // parts, settings, step, *of_parts).joined(parts)

    return plan


_FOLDERS = {**dict.fromkeys(GUIDED_PLANNERS, "guided."), **dict.fromkeys(RESULT_PLANNERS, "by_result.")}
_MODULES = {name: importlib.import_module(f"{__name__}.{_FOLDERS.get(name, '')}{name}") for name in NAMES}
PLANNERS: dict[str, Planner] = {
    name: _on_whole_grids(getattr(module, f"plan_{name}")) for name, module in _MODULES.items()
}
