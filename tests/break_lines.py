"""Break central lines of the library, one at a time, and count the tests that notice each.

    python tests/break_lines.py tests/ops tests/planners

The arguments go to pytest. The lines are broken in a copy of ``src``, so that nothing has to be restored.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Break(NamedTuple):
    """A line of the library, and what it becomes."""

    what: str
    file: str
    line: str
    broken: str


BREAKS = (
    Break(
        "the mean of a merged token",
        "ops/plan.py",
        "        total.div_(self.sizes.view(-1, 1))\n",
        "",
    ),
    Break(
        "the rows that unmerging reads",
        "ops/plan.py",
        "index_select(0, self.inverse.flatten())",
        "index_select(0, self.inverse.roll(1, 1).flatten())",
    ),
    Break(
        "the sign of a similarity",
        "ops/matching.py",
        "    return product / sources.norm(dim=-1).clamp(min=smallest), nearest",
        "    return -product / sources.norm(dim=-1).clamp(min=smallest), nearest",
    ),
    Break(
        "linear extrapolation",
        "runtime/memory/reuse.py",
        "value + delta * (agreement * distance)",
        "value - delta * (agreement * distance)",
    ),
    Break(
        "which step is complete",
        "runtime/patching/due.py",
        'tracker, "blocks", step.done in runs.full,',
        'tracker, "blocks", step.done + 1 in runs.full,',
    ),
    Break(
        "the index of a step",
        "runtime/steps/scheduler.py",
        "    generation = _generation_of(scheduler, timesteps, int(index), runs_here)\n",
        "    index = max(int(index) - 1, 0)\n"
        "    generation = _generation_of(scheduler, timesteps, int(index), runs_here)\n",
    ),
    Break(
        "the class that removal puts back",
        "runtime/patching/swap.py",
        "    module.__class__ = _without(made, swapped)\n",
        "",
    ),
    Break(
        "the frames of a grid",
        "planners/_grid.py",
        "return (grid[0], tuple(grid[1:])) if settings.st == 1",
        "return (1, (grid[0] * grid[1], grid[2])) if settings.st == 1",
    ),
    Break(
        "log(size) of proportional attention",
        "runtime/blocks/proportional_attention.py",
        "bias = sizes.log().to(key.dtype)",
        "bias = sizes.to(key.dtype)",
    ),
    Break(
        "the place of the image in a joint sequence",
        "models/layout.py",
        'if self.text == "first" else',
        'if self.text != "first" else',
    ),
)


def source(package: Path, edit: Break) -> str:
    """Return the broken file. Refuse an edit whose line is not there exactly once."""
    text = (package / edit.file).read_text(encoding="utf-8")
    if text.count(edit.line) != 1:
        raise SystemExit(f"{edit.file}: expected once, found {text.count(edit.line)} times: {edit.line!r}")
    return text.replace(edit.line, edit.broken)


def failures(src: Path, selection: list[str]) -> tuple[int, int]:
    """Run tests on the copy of the library. Return how many failed, and how many ran."""
    paths = [str(src), str(ROOT / "tools" / "src"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", *selection]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode not in (0, 1):
        raise SystemExit(run.stdout + run.stderr)
    found = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", run.stdout)}
    noticed = found.get("failed", 0) + found.get("error", 0)
    return noticed, noticed + found.get("passed", 0)


def main(selection: list[str]) -> None:
    """Print how many tests of a selection fail for each broken line."""
    with tempfile.TemporaryDirectory() as folder:
        src = Path(folder) / "src"
        shutil.copytree(ROOT / "src", src, ignore=shutil.ignore_patterns("__pycache__"))
        package = src / "tokenmerge"
        broken = [(edit, source(package, edit)) for edit in BREAKS]  # all are there, before anything runs
        failed, ran = failures(src, selection)
        if failed:
            raise SystemExit(f"{failed} of {ran} tests fail before anything is broken")
        print(f"| broken line | of {ran} tests, so many fail |\n|---|---:|", flush=True)
        for edit, text in broken:
            file = package / edit.file
            intact = file.read_text(encoding="utf-8")
            file.write_text(text, encoding="utf-8")
            print(f"| {edit.what} | {failures(src, selection)[0]} |", flush=True)
            file.write_text(intact, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
