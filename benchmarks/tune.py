"""Measure the result of `tokenmerge tune` again on prompts and seeds that the search never saw.

For each case, the search runs within its budget. Then other prompts are drawn from other seeds, in
interleaved calls: dense, with the chosen settings, with `auto` a little slower and a little faster than
these, and with fewer steps. A line shows the speed-up and the PSNR of each with their standard errors, and
the PSNR of `auto` at the speed of the chosen settings, by linear interpolation. A case that is already in the
file is skipped, and a search that was interrupted continues.

    python benchmarks/tune.py --out benchmarks/tune_cpu.jsonl
    python benchmarks/tune.py --case emoji-unet:4 --within 600 --prompts 6
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import tokenmerge
from tokenmerge_tools.evaluate.evaluation import plan_evaluation
from tokenmerge_tools.evaluate.metrics import load_metrics
from tokenmerge_tools.evaluate.prompts import Item, built_in_prompts
from tokenmerge_tools.files import prepare_folder
from tokenmerge_tools.pipelines.loading import quiet_libraries
from tokenmerge_tools.tune.candidates import AUTO_FAMILY
from tokenmerge_tools.tune.goal import Goal, TuneOptions
from tokenmerge_tools.tune.measurements import Estimate, Look, estimates
from tokenmerge_tools.tune.rounds import Outcome, Rounds
from tokenmerge_tools.tune.runner import Search, tune

CASES = ("emoji-unet:20", "emoji-unet:4", "emoji-mmdit:20", "emoji-mmdit:4")
# The search draws the first prompts with seed 0.
UNSEEN, SEED = 50, 1000


def compared(search: Search) -> list[str]:
    """Return the chosen settings, the next slower and faster ones of auto, and the same for fewer steps.

    There are two on each side, because the search timed most of them only once.
    """
    found = estimates(search.looks)
    assert search.decision is not None
    chosen = found[search.decision.name]
    names = [chosen.name]
    for family in (AUTO_FAMILY, "fewer-steps"):
        own = [one for name, one in found.items() if search.candidates[name].entry.family == family]
        own.sort(key=lambda one: one.speedup)
        slower = [one.name for one in own if one.speedup <= chosen.speedup]
        faster = [one.name for one in own if one.speedup > chosen.speedup]
        names += slower[-2:] + faster[:2]
    return list(dict.fromkeys(names))


def measured_again(search: Search, count: int) -> list[Look]:
    """Measurements on prompts and seeds that the search never saw."""
    options = search.options
    device = torch.device("cpu")
    evaluation = plan_evaluation(options.evaluation(), device)
    prompts = built_in_prompts()[UNSEEN : UNSEEN + count]
    items = tuple(Item(prompt, SEED + number) for number, prompt in enumerate(prompts))
    evaluation = replace(evaluation, items=items, prompts=tuple(prompts))
    prepare_folder(evaluation.store.folder)
    metrics = load_metrics(options.evaluation().wanted(), [prompt.text for prompt in prompts], print)
    studio = Rounds(options, evaluation, metrics, device)
    chosen = [search.candidates[name] for name in compared(search)]
    configs = {one.name: search.configs.get(one.name) for one in chosen}
    looks = []
    for number in range(count):
        for drawing in studio.draw(number, chosen, configs):
            assert isinstance(drawing, Outcome), drawing
            psnr = drawing.metrics["psnr"]
            looks.append(Look(drawing.name, number, drawing.seconds, drawing.dense_seconds, psnr))
            print(f"  {number + 1}/{count} {drawing.name}: {psnr:.1f} dB", flush=True)
    return looks


def at_speed(speedup: float, found: Sequence[Estimate]) -> float | None:
    """PSNR of a family at a speed-up, interpolated. None without a slower and a faster setting."""
    slower = max((one for one in found if one.speedup <= speedup), key=lambda o: o.speedup, default=None)
    faster = min((one for one in found if one.speedup >= speedup), key=lambda o: o.speedup, default=None)
    if slower is None or faster is None:
        return None
    share = 0.0 if slower is faster else (speedup - slower.speedup) / (faster.speedup - slower.speedup)
    return slower.closeness + share * (faster.closeness - slower.closeness)


def run(case: str, options: argparse.Namespace) -> dict[str, Any]:
    model, steps = case.split(":")
    goal = Goal("psnr", speedup=options.min_speedup)
    wanted = TuneOptions(
        goal=goal,
        model=model,
        size=(options.size, options.size),
        steps=int(steps),
        within=options.within,
        device="cpu",
        out=options.folder / f"tune-{model}-{options.size}-{steps}.json",
    )
    began = time.perf_counter()
    search = tune(wanted, lambda p: print(f"  {p.spent:.0f} s: {p.running}", flush=True), print)
    seconds = time.perf_counter() - began
    if search.decision is None or not search.complete:
        raise SystemExit("interrupted; run the same command again to continue")
    looks = measured_again(search, options.prompts)
    found = estimates(looks)
    chosen = found[search.decision.name]
    family = {name: search.candidates[name].entry.family for name in found}
    print(f"\n{model}, {options.size} × {options.size}, {steps} steps: {goal}; searched for {seconds:.0f} s")
    for one in found.values():
        error = f"± {one.closeness_error:.1f}"
        print(f"{one.speedup:6.2f}× ± {one.speedup_error:.2f} {one.closeness:6.1f} dB {error}  {one.name}")
    for name in (AUTO_FAMILY, "fewer-steps"):
        at = at_speed(chosen.speedup, [one for one in found.values() if family[one.name] == name])
        text = "no settings on both sides" if at is None else f"{at:.1f} dB"
        print(f"{name} at {chosen.speedup:.2f}×: {text}")
    return {
        "model": model,
        "size": options.size,
        "steps": int(steps),
        "min_speedup": options.min_speedup,
        "within": options.within,
        "seconds": round(seconds),
        "chosen": search.decision.name,
        "reached": search.decision.reached,
        "sure": search.decision.sure,
        "searched": {
            one.name: [round(one.speedup, 3), round(one.closeness, 2), one.looks]
            for one in estimates(search.looks).values()
        },
        "again": {
            name: {
                "speedup": [look.dense_seconds / look.seconds for look in looks if look.name == name],
                "psnr": [look.closeness for look in looks if look.name == name],
            }
            for name in found
        },
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "tokenmerge": tokenmerge.__version__,
        "dense_seconds": statistics.median(look.dense_seconds for look in looks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", default=CASES, help="MODEL:STEPS")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--min-speedup", type=float, default=1.5)
    parser.add_argument("--within", type=float, default=1000.0, help="seconds (default: 1000)")
    parser.add_argument("--prompts", type=int, default=6, help="unseen prompts, 2 or more (default: 6)")
    parser.add_argument("--folder", type=Path, default=Path("outputs"), help="folder of the searches")
    parser.add_argument("--out", type=Path, help="append a JSON line for each case")
    options = parser.parse_args()
    quiet_libraries("benchmarks/tune.py")
    done = []
    if options.out is not None and options.out.exists():
        done = [json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()]
    for case in options.case:
        model, steps = case.split(":")
        if any((model, int(steps), options.size) == (r["model"], r["steps"], r["size"]) for r in done):
            print(f"{case} is in {options.out}")
            continue
        found = run(case, options)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
