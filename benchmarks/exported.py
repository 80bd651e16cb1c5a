"""Exported denoisers on a CPU: an LCM-like loop of few steps, dense and merged, in ONNX Runtime and OpenVINO.

The denoiser has the geometry of a well-known model and random weights, so that nothing is downloaded. It is
exported once for each ratio and engine, and PyTorch runs the same loop for the reference. Both are kept in a
folder. Then each engine runs in a process of its own: it loads its models, calls each once without timing,
and runs their loops with interleaved steps. Every loop adds a line to the record, and a run that was stopped
continues with the unfinished round.

    python benchmarks/exported.py --only-export                        # once, and slow
    python benchmarks/exported.py --out benchmarks/exported_cpu.jsonl  # while the machine does nothing else
    python benchmarks/exported.py --out benchmarks/exported_cpu.jsonl --table
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import LCMScheduler

import tokenmerge
from tokenmerge.api import token_merging
from tokenmerge.models.find import find_hosts
from tokenmerge_tools.bench.loaded_model import PREFIX, build_denoiser, example_inputs, find_geometry
from tokenmerge_tools.export import export_denoiser
from tokenmerge_tools.export.formats import FORMATS
from tokenmerge_tools.export.graph import DenoiserCall
from tokenmerge_tools.export.run import settings_of
from tokenmerge_tools.machine import environment, source_commit
from tokenmerge_tools.method_spec import MethodSpec, merging_alone

PYTORCH = "pytorch"
SCALE = 8  # pixels per latent position
KEY = ("model", "size", "steps", "engine", "ratio")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="geometry:sd15", help="a UNet as geometry:NAME")
    parser.add_argument("--size", type=int, default=768, help="pixels (default: 768)")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ratio", type=float, nargs="+", default=[0.0, 0.6])
    parser.add_argument("--engine", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="loops of each model (default: 2)")
    parser.add_argument("--exports", type=Path, default=Path("outputs/exported"), help="folder for exports")
    parser.add_argument("--out", type=Path, default=Path("outputs/exported.jsonl"))
    parser.add_argument(
        "--only-export", action="store_true", help="write the exports and references, and stop"
    )
    parser.add_argument("--table", action="store_true", help="print the table of the record and stop")
    parser.add_argument("--reference", type=float, metavar="RATIO", help=argparse.SUPPRESS)
    parser.add_argument("--export-one", nargs=2, metavar=("ENGINE", "RATIO"), help=argparse.SUPPRESS)
    parser.add_argument("--measure", metavar="ENGINE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        return table(options)
    if options.reference is not None:
        return write_reference(options, options.reference)
    if options.export_one:
        return export_one(options, options.export_one[0], float(options.export_one[1]))
    if options.measure:
        return measure(options, options.measure)

    for ratio in options.ratio:
        if not reference_file(options, ratio).exists():
            child("--reference", str(ratio))
    for engine in options.engine:
        for ratio in options.ratio:
            if not folder_of(options, engine, ratio).exists():
                child("--export-one", engine, str(ratio))
    if options.only_export:
        return
    for engine in options.engine:
        if rounds_done(options, engine) < options.rounds:
            child("--measure", engine)
    table(options)


def child(*arguments: str) -> None:
    """Run one part of the benchmark in a process of its own."""
    subprocess.run([sys.executable, "-W", "ignore", *sys.argv, *arguments], check=True)


def folder_of(options: argparse.Namespace, engine: str, ratio: float) -> Path:
    name = options.model.removeprefix(PREFIX)
    return options.exports / f"{name}-{options.size}-{engine}-{ratio:g}"


def reference_file(options: argparse.Namespace, ratio: float) -> Path:
    """Return the file with the results of PyTorch's loop, one for each step, and the text embedding."""
    folder = folder_of(options, PYTORCH, ratio)
    return folder.with_name(f"{folder.name}-{options.steps}-steps.npz")


def make_call(options: argparse.Namespace) -> DenoiserCall:
    """Return the denoiser with a call for one image without guidance, as LCM makes it."""
    model = build_denoiser(find_geometry(options.model), torch.float32, torch.device("cpu"), seed=0)
    side = options.size // SCALE
    (sample,), others = example_inputs(model, (side, side), 1, guided=False)
    (host,) = find_hosts(model)
    arguments = {host.sample: sample, **others}
    arguments["timestep"] = torch.full_like(arguments["timestep"], 999)
    return DenoiserCall(model, arguments, (options.size, options.size), (side, side))


def merging(ratio: float) -> MethodSpec:
    """Return token merging alone, on all token grids."""
    return merging_alone(ratio, {})


def export_one(options: argparse.Namespace, engine: str, ratio: float) -> None:
    folder = folder_of(options, engine, ratio)
    begin = time.perf_counter()
    found = export_denoiser(lambda: make_call(options), merging(ratio), folder, engine, options.model)
    took = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"exported {folder.name} in {took:.0f} s, peak {peak / 1e6:.1f} GB, "
        f"difference {found['check']['relative_difference']:.1e}",
        file=sys.stderr,
    )


def loop(
    options: argparse.Namespace, call: Callable[[np.ndarray, float], np.ndarray]
) -> Iterator[tuple[float, np.ndarray]]:
    """Denoise from the noise of one seed, and yield the time and the result of each denoiser call."""
    scheduler = LCMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    scheduler.set_timesteps(options.steps)
    generator = torch.Generator().manual_seed(0)
    side = options.size // SCALE
    latents = torch.randn(1, 4, side, side, generator=generator)
    for step in scheduler.timesteps:
        begin = time.perf_counter()
        result = call(latents.numpy(), float(step))
        yield time.perf_counter() - begin, result
        latents = scheduler.step(torch.from_numpy(result), step, latents, generator=generator).prev_sample


def write_reference(options: argparse.Namespace, ratio: float) -> None:
    """Run PyTorch's loop, and write its results."""
    torch.set_num_threads(options.threads)
    made = make_call(options)
    text = made.arguments["encoder_hidden_states"]

    def call(sample: np.ndarray, step: float) -> np.ndarray:
        arguments = (torch.from_numpy(sample), torch.full((1,), step), text)
        with torch.no_grad():
            return made.denoiser(*arguments, return_dict=False)[0].numpy()

    with token_merging(made, settings_of(merging(ratio), made)):
        results = [result for _, result in loop(options, call)]
    reference_file(options, ratio).parent.mkdir(parents=True, exist_ok=True)
    np.savez(reference_file(options, ratio), results=np.stack(results), text=text.numpy())


def load(options: argparse.Namespace, engine: str, ratio: float) -> Callable[[np.ndarray, float], np.ndarray]:
    """Load an exported model with the text embedding of the reference, and call it once."""
    model = FORMATS[engine].load(folder_of(options, engine, ratio), options.threads)
    text = np.load(reference_file(options, ratio))["text"]

    def call(sample: np.ndarray, step: float) -> np.ndarray:
        timestep = np.full(1, step, dtype=np.float32)
        return model({"sample": sample, "timestep": timestep, "encoder_hidden_states": text})

    next(loop(options, call))
    return call


def measure(options: argparse.Namespace, engine: str) -> None:
    """Run the rounds of an engine that are not in the record."""
    torch.set_num_threads(options.threads)
    models = {ratio: load(options, engine, ratio) for ratio in options.ratio}
    for number in range(rounds_done(options, engine) + 1, options.rounds + 1):
        loops = {ratio: loop(options, model) for ratio, model in models.items()}
        found: dict[float, list[tuple[float, np.ndarray]]] = {ratio: [] for ratio in loops}
        for step in range(options.steps):
            order = options.ratio if (step + number) % 2 else options.ratio[::-1]
            for ratio in order:
                found[ratio].append(next(loops[ratio]))
        for ratio, steps in found.items():
            write(options, engine, ratio, steps)


def write(
    options: argparse.Namespace, engine: str, ratio: float, steps: list[tuple[float, np.ndarray]]
) -> None:
    """Append a line for a loop to the record, with the difference of each result from PyTorch's."""
    expected = np.load(reference_file(options, ratio))["results"]
    about = json.loads((folder_of(options, engine, ratio) / "export.json").read_text(encoding="utf-8"))
    differences = []
    for (_, result), other in zip(steps, expected, strict=True):
        differences.append(float(np.abs(result - other).max() / np.abs(other).max()))
    line = {
        "model": options.model,
        "size": options.size,
        "steps": options.steps,
        "engine": engine,
        "ratio": ratio,
        "step_seconds": [seconds for seconds, _ in steps],
        "differences": differences,
        "threads": options.threads,
        "load": os.getloadavg()[0],
        "method": merging(ratio).to_dict(),
        "export": about,
        "tokenmerge": tokenmerge.__version__,
        "commit": source_commit(),
        "environment": environment(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{engine}, ratio {ratio:g}: {sum(line['step_seconds']):.1f} s", file=sys.stderr)


def rounds_done(options: argparse.Namespace, engine: str) -> int:
    """Return the number of rounds in the record for which all ratios were measured."""
    return min(len(records(options, engine, ratio)) for ratio in options.ratio)


def records(options: argparse.Namespace, engine: str, ratio: float) -> list[dict[str, Any]]:
    """Return the lines of one model in the record, in the order in which they were measured."""
    if not options.out.exists():
        return []
    wanted = (options.model, options.size, options.steps, engine, ratio)
    lines = map(json.loads, options.out.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if tuple(line[name] for name in KEY) == wanted]


def table(options: argparse.Namespace) -> None:
    """Print the times of loops, the speed-up of interleaved steps, and the largest difference."""
    print(
        "| program | ratio | tokens | time of a loop | speed-up of steps | largest difference from PyTorch "
        "| with the same plans |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for engine in options.engine:
        dense = steps_of(records(options, engine, 0.0))
        for ratio in options.ratio:
            found = records(options, engine, ratio)
            if not found:
                continue
            pairs = zip(dense, steps_of(found), strict=False) if ratio else ()
            gains = [before / after for before, after in pairs]
            merges = found[0]["export"]["merging"]
            tokens = f"{merges['tokens']} → {merges['merged_tokens']}" if ratio else ""
            times = [sum(one["step_seconds"]) for one in found]
            worst = max(max(one["differences"]) for one in found)
            checks = found[-1].get("same_plans") or []
            same = f"{max(step['difference'] for step in checks):.1e}" if checks else ""
            cells = [engine, f"{ratio:g}", tokens, spread(times, " s"), spread(gains, "×", 2)]
            cells += [f"{worst:.1e}", same]
            print("| " + " | ".join(cells) + " |")


def steps_of(found: list[dict[str, Any]]) -> list[float]:
    """Return the seconds of all steps, in the order in which they ran."""
    steps: list[float] = []
    for one in found:
        steps += one["step_seconds"]
    return steps


def spread(values: list[float], unit: str, digits: int = 1) -> str:
    """Write the median of values, with the lowest and the highest in brackets."""
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f}{unit} ({low:.{digits}f}–{high:.{digits}f})"


if __name__ == "__main__":
    main()
