"""The names of the planners: one for each file in ``planners``, listed without importing it."""

from __future__ import annotations

import pkgutil
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "planners"


def names_in(folder: Path) -> tuple[str, ...]:
    """Names of the modules in a folder, without packages and without names that start with an underscore."""
    modules = pkgutil.iter_modules([str(folder)])
    return tuple(sorted(m.name for m in modules if not m.ispkg and not m.name.startswith("_")))


# Planners that look at what guidance changed in the last step; they plan as "tome" until that is known.
GUIDED_PLANNERS = names_in(_FOLDER / "guided")
# Planners that look at the model's result of the last step, likewise.
RESULT_PLANNERS = names_in(_FOLDER / "by_result")
PLANNERS = (*names_in(_FOLDER), *GUIDED_PLANNERS, *RESULT_PLANNERS)
# Planners whose cells may reach over several frames of a video.
OVER_TIME = ("tiled", "tome")
# Planners that sort single tokens by their similarity, and take a penalty that is subtracted from it.
PENALISED_PLANNERS = ("local", "threshold", "tiled", "tome")
