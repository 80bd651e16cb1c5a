"""Planners: functions that choose which tokens merge. One planner per file, named after it.

A file ``x.py`` here has the function ``plan_x``, and the table ``TRAITS`` in
:mod:`tokenmerge.config.settings` has a line for it. The function plans one part of a token grid: a frame, or
a whole video if cells reach over time.

``plan_x(features, grid, r, settings, step) -> Plan``, with

- ``features`` ``[b, n, c]``: what is compared, the input of the block;
- ``grid``: (rows, columns) of the n tokens, or (frames, rows, columns);
- ``r``: the number of tokens to remove, 1 ≤ r < n;
- ``settings``: strides, seed and other knobs of :class:`tokenmerge.ToMeConfig`;
- ``step``: 0-dimensional integer tensor that differs between denoising steps; random draws depend on it.

A planner with the trait ``guided`` gets one more argument, ``importance`` ``[b, n]``: how much guidance
changed each token in the last step. ``sequences`` plans whole grids and sequences of images with a planner.
"""

from __future__ import annotations

from importlib import import_module

from tokenmerge.config import PLANNERS as NAMES
from tokenmerge.planners.sequences import Planner, on_whole_grids

PLANNERS: dict[str, Planner] = {
    name: on_whole_grids(getattr(import_module(f"{__name__}.{name}"), f"plan_{name}")) for name in NAMES
}
