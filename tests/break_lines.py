"""Break central lines of the library, one at a time, and show which tests notice each.

    python tests/break_lines.py tests/ops tests/planners
    python tests/break_lines.py --only "step|extrapolation" -m "not slow" tests/runtime/test_steps.py

With ``--only``, a line is broken if this pattern is in its description. The other arguments go to pytest. The
lines are broken in a copy of ``src``, so that nothing has to be restored.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
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
        "        sizes = self.sizes.view(-1, 1)\n",
        "        sizes = self.weights or 1\n",
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
        "    return product if lengths is None else product / lengths, nearest",
        "    return -product if lengths is None else -product / lengths, nearest",
    ),
    Break(
        "linear extrapolation",
        "runtime/memory/caches.py",
        "value + delta * (agreement * distance)",
        "value - delta * (agreement * distance)",
    ),
    Break(
        "which step is full",
        "runtime/steps/step_tracker.py",
        "    planned = plan_generation(config, tracker.steps)[tracker.done]\n",
        "    planned = plan_generation(config, tracker.steps)[tracker.done - 1]\n",
    ),
    Break(
        "the index of a step",
        "runtime/steps/scheduler.py",
        "    index = int(index)\n",
        "    index = max(int(index) - 1, 0)\n",
    ),
    Break(
        "the class that removal puts back",
        "runtime/patching/swap.py",
        "        module.__class__ = _without(made, swapped)\n",
        "",
    ),
    Break(
        "the frames of a grid",
        "planners/sequences.py",
        "return grid[0], tuple(grid[1:])",
        "return 1, (grid[0] * grid[1], grid[2])",
    ),
    Break(
        "log(size) of proportional attention",
        "runtime/blocks/proportional_attention.py",
        "lambda: _log(sizes, key.dtype)",
        "lambda: sizes.to(key.dtype)",
    ),
    Break(
        "the place of the image in a joint sequence",
        "models/base.py",
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


def failures(src: Path, selection: list[str]) -> tuple[Counter[str], int]:
    """Run tests on the copy of the library. Return how many failed in each file, and how many ran."""
    paths = [str(src), str(ROOT / "tools" / "src"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *selection]
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
    noticed = Counter(re.findall(r"^(?:FAILED|ERROR) ([^:\n]+)::", run.stdout, flags=re.MULTILINE))
    ran = sum(int(n) for n in re.findall(r"(\d+) (?:passed|failed|error)", run.stdout.splitlines()[-1]))
    return noticed, ran


def main(only: str, selection: list[str]) -> None:
    """Print which tests of a selection fail for each broken line."""
    with tempfile.TemporaryDirectory() as folder:
        src = Path(folder) / "src"
        shutil.copytree(ROOT / "src", src, ignore=shutil.ignore_patterns("__pycache__"))
        package = src / "tokenmerge"
        # All lines are there, before anything runs.
        broken = [(edit, source(package, edit)) for edit in BREAKS if re.search(only, edit.what)]
        failed, ran = failures(src, selection)
        if failed:
            raise SystemExit(
                f"{failed.total()} of {ran} tests fail before anything is broken: {dict(failed)}"
            )
        print(f"| broken line | of {ran} tests, so many fail | in |\n|---|---:|---|", flush=True)
        for edit, text in broken:
            file = package / edit.file
            intact = file.read_text(encoding="utf-8")
            file.write_text(text, encoding="utf-8")
            noticed, _ = failures(src, selection)
            where = ", ".join(f"{name} ({count})" for name, count in noticed.most_common())
            print(f"| {edit.what} | {noticed.total()} | {where} |", flush=True)
            file.write_text(intact, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a pattern in the description of a line")
    own, rest = parser.parse_known_args()
    main(own.only, rest)
