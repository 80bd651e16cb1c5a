"""Measure token merging and step reuse on one GPU: the parts of merged attention, models, stacks, speed-ups.

Each measurement is one line of JSON, and is on the disk before the next one begins, so a run that is cut off
keeps what it has measured. The same command continues it: what the record has is not measured again. The
parts run in the order of their value, each within a budget of seconds. A measurement that fails is recorded
with its error, and the run goes on. Nothing is downloaded: weights are random, except those of the bundled
models.

    python benchmarks/gpu.py --out gpu.jsonl                        # everything, below 10 minutes on an H200
    python benchmarks/gpu.py --out gpu.jsonl                        # again: the parts that are missing
    python benchmarks/gpu.py --parts env,attention --limit 120
    python benchmarks/gpu.py --device cpu --tiny --out tiny.jsonl   # the same code on small models
    python benchmarks/gpu.py --show gpu.jsonl                       # the tables of a record
    python benchmarks/gpu.py --write                                # the tables of docs/gpu.md
"""

from __future__ import annotations

import argparse
import faulthandler
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

BEGAN = time.monotonic()  # the imports below count too

import torch  # noqa: E402
from on_gpu.correct import correct  # noqa: E402
from on_gpu.device import attention, env  # noqa: E402
from on_gpu.models_timed import compiled, graphs, grid, pictures, profile, sdxl, transformer  # noqa: E402
from on_gpu.record import Run  # noqa: E402
from on_gpu.tables import acceptance, page_tables, table  # noqa: E402

PAGE = Path(__file__).parent.parent / "docs" / "gpu.md"
# The records in the documentation, by card.
_HERE = Path(__file__).parent
CARDS = {
    "NVIDIA H200": [_HERE / f"gpu_h200{run}.jsonl" for run in ("", "_b", "_c", "_d", "_e")],
    "NVIDIA H100": [_HERE / f"gpu_h100{run}.jsonl" for run in ("", "_b", "_c")],
}
LIMIT = 575.0  # seconds of a run
# A run that hangs is ended this many seconds after its limit.
GRACE = 10.0


class Part(NamedTuple):
    """A part of the run.

    Attributes:
        measure: records its measurements.
        budget: the seconds after which it leaves out the rest.
        expected: the seconds that it should take on an H200, by the times of calls in earlier records.
    """

    measure: Callable[[Run], None]
    budget: float
    expected: float


def flux(run: Run) -> None:
    """Measure FLUX.1."""
    sizes = {"1024": (1024, 1024), "2048": (2048, 2048)}
    transformer(run, "flux", sizes, {"1024": 3, "2048": 1}, {"1024": 1})


def sd3(run: Run) -> None:
    """Measure Stable Diffusion 3."""
    transformer(run, "sd3", {"1024": (1024, 1024)}, {"1024": 3}, {"1024": 2})


def wan(run: Run) -> None:
    """Measure Wan 2.1 with videos of 81 frames; at 720p with a fifth of its blocks, which are all alike."""
    sizes = {"480": (480, 832), "720": (720, 1280)}
    rounds = {"480": 1, "720": 1}
    transformer(run, "wan", sizes, rounds, {"480": 1}, frames=81, fewer_blocks={"720": 6})


# The parts of a run in the order of their value.
PARTS = {
    "env": Part(env, 5, 1),
    "attention": Part(attention, 90, 80),
    "profile": Part(profile, 20, 12),
    "sd15": Part(grid, 140, 100),
    "flux": Part(flux, 105, 90),
    "sd3": Part(sd3, 35, 28),
    "wan": Part(wan, 140, 118),
    "graph": Part(graphs, 20, 12),
}
# Parts that run only where they are asked for.
MORE_PARTS = {
    "correct": Part(correct, 60, 57),
    "pictures": Part(pictures, 35, 9),
    "sdxl": Part(sdxl, 90, 60),
    "compile": Part(compiled, 180, 84),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = PARTS | MORE_PARTS
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, everything at most twice")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="the record, which is continued")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(known)}")
    parser.add_argument(
        "--variants", type=lambda given: given.split("/"), default=[], help="of dense/ratio 0.5/…"
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help="seconds for the run, with the time for imports"
    )
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    parser.add_argument("--show", type=Path, help="show the tables of a record, and measure nothing")
    parser.add_argument("--write", type=Path, nargs="*", help="write docs/gpu.md from records; default: ours")
    options = parser.parse_args(arguments)
    if options.show is not None:
        show(options.show)
        return
    if options.write is not None:
        write(options.write)
        return
    parts = options.parts.split(",")
    if unknown := set(parts) - set(known):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    check_device(options.device)
    if not options.tiny:
        faulthandler.dump_traceback_later(options.limit + GRACE, exit=True)  # a run that hangs
    run = Run(options, BEGAN)
    try:
        for name in parts:
            measure_part(run, name, known[name])
    finally:
        run.begin("end", 0)
        run.write("summary", "done", **run.statuses)
        faulthandler.cancel_dump_traceback_later()
    show(options.out)


def measure_part(run: Run, name: str, part: Part) -> None:
    """Run a part within its budget, unless the record has all of it."""
    if run.has(name):
        print(f"{name}: the record has it", flush=True)
        return
    run.begin(name, part.budget)
    began = time.monotonic()

    def measure() -> dict:
        part.measure(run)
        return {}

    done = run.measure("part", measure, again=True)
    run.end(time.monotonic() - began, failed=done is None)
    run.free()


def check_device(device: str) -> None:
    """Say in one line what a run lacks on this machine."""
    if find_spec("diffusers") is None:
        raise SystemExit("diffusers is missing, which has the models: pip install diffusers")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit(
            f"no GPU: PyTorch {torch.__version__} finds no CUDA device; run this on a machine with one, or "
            "check the script here with --device cpu --tiny"
        )


def show(record: Path) -> None:
    """Print the tables of a record: what was measured, and what is wanted."""
    print(table(record))
    print()
    print(acceptance(record))


def write(records: list[Path]) -> None:
    """Write the tables of docs/gpu.md from records, or from those in this folder if none are given."""
    before, rest = PAGE.read_text(encoding="utf-8").split("<!-- measured -->\n", 1)
    after = rest.split("<!-- end of measured -->", 1)[1]
    tables = page_tables({"one generation": records} if records else CARDS)
    made = f"<!-- measured -->\n{tables}\n<!-- end of measured -->"
    PAGE.write_text(before + made + after, encoding="utf-8")


if __name__ == "__main__":
    main()
