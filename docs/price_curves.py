"""Draw the price curves, and write the tables of results.md and methods/, from the records in benchmarks.

    python docs/price_curves.py          # writes docs/price-MODEL-SIZE-STEPS-GUIDANCE.svg and the tables

Rows named auto are left out: they are of a default method that took a ratio and is gone.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenmerge_tools.records.file import read_results
from tokenmerge_tools.records.kinds import CellRecord, QualityRecord, cell_of_pictures, words_with_new_names
from tokenmerge_tools.reporting.curves import AGAINST_CLOSENESS, Chart, charts
from tokenmerge_tools.reporting.page import newest
from tokenmerge_tools.reporting.plots import draw
from tokenmerge_tools.variants.variant import DENSE

ROOT = Path(__file__).parent.parent
TABLE = re.compile(
    r"(<!-- (closeness|settings|speeds|points of [\w, -]+):.*?-->\n).*?(<!-- end -->)",
    flags=re.DOTALL,
)
GONE = "auto"
AS_FAST = 1.1  # fewer steps are shown beside a method whose speed differs by less than this factor


def curves() -> dict[str, Chart]:
    """One for each model, size, number of steps and guidance that closeness was measured with, by its name."""
    results = read_results(sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")))
    (cells, _), (quality, _) = newest(results.cells), newest(results.quality)
    found: dict[str, list] = {}
    for record in sorted((record for record in quality if _is_kept(record)), key=_order):
        conditions = record.conditions
        name = f"{record.model}-{record.width}-{conditions['steps']}-{conditions['guidance']:g}"
        found.setdefault(name, []).append(record)
    return {
        name: chart
        for name, records in found.items()
        for chart in charts(cells, records)
        if chart.title.startswith(AGAINST_CLOSENESS) and chart.x.startswith("PSNR")
    }


def _is_kept(record: QualityRecord) -> bool:
    """Return whether a record is of a variant that there still is, or of fewer steps, which are of no variant."""
    return not record.label.startswith(GONE)


def _order(record: QualityRecord) -> tuple:
    """By model and size, then the longest generation first, and the weakest guidance."""
    return record.model, record.width, -record.conditions["steps"], record.conditions["guidance"]


def tables(drawn: Mapping[str, Chart]) -> str:
    """Return closeness and speed-up of the points of all curves, in Markdown: for each model a row a setting."""
    models = dict.fromkeys("-".join(name.split("-")[:2]) for name in drawn)
    of_model = {model: {n: chart for n, chart in drawn.items() if n.startswith(model)} for model in models}
    return "\n".join(_table(model, charts) for model, charts in of_model.items())


def _table(model: str, drawn: Mapping[str, Chart]) -> str:
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for name, chart in drawn.items():
        for line in chart.lines:
            for (closeness, speed), label in zip(line.points, line.labels, strict=True):
                rows.setdefault((line.name, label), {})[name] = f"{closeness:.1f} at {speed:.2f}×"
    heads = [
        re.sub(r"-(\d+)-(\d+)-(.*)", r"\1 px, \2 steps, guidance \3", name.removeprefix(model))
        for name in drawn
    ]
    lines = [f"| {model} | | {' | '.join(heads)} |", f"|---|---|{'---:|' * len(heads)}"]
    for (method, label), values in sorted(rows.items(), key=lambda row: (row[0][0], float(row[0][1] or 0))):
        lines.append(f"| {method} | {label} | {' | '.join(values.get(name, '') for name in drawn)} |")
    return "\n".join(lines) + "\n"


def points_table(drawn: Mapping[str, Chart], methods: Sequence[str]) -> str:
    """Each point of the methods, in Markdown, with the number of steps that is about as fast without merging."""
    lines = [
        "| images | method | setting | speed-up | PSNR to dense | as fast: fewer steps |",
        "|---|---|---:|---:|---:|---|",
    ]
    for name, chart in drawn.items():
        model, size, steps, guidance = name.rsplit("-", 3)
        pictures = f"{model}, {size} px, {steps} steps, guidance {guidance}"
        fewer = [
            (speed, closeness, label)
            for line in chart.lines
            if line.name == "fewer-steps"
            for (closeness, speed), label in zip(line.points, line.labels, strict=True)
        ]
        for line in chart.lines:
            for (closeness, speed), label in zip(line.points, line.labels, strict=True):
                if line.name in methods:
                    beside = _as_fast(speed, fewer)
                    figures = f"{speed:.2f}× | {closeness:.1f} dB | {beside}"
                    lines.append(f"| {pictures} | {line.name} | {label} | {figures} |")
    return "\n".join(lines) + "\n"


def joint_table() -> str:
    """Return closeness, counted operations and time of cache-dit, merging, and both, in Markdown: a row a variant."""
    files = sorted((ROOT / "benchmarks" / "results").glob("cpu-cache-dit-*.jsonl"))
    if not files:
        return "Not measured yet.\n"
    results = read_results(files)
    (cells, _), (quality, _) = newest(results.cells), newest(results.quality)
    lines = [
        "| images | variant | PSNR to dense | operations | time |",
        "|---|---|---:|---:|---:|",
    ]
    rows = []
    for record in quality:
        if record.category is None and record.variant != DENSE and GONE not in record.label:
            cell = cell_of_pictures(record.label, record.drawn_with, cells)
            counted, timed = _costs(record, cell)
            rows.append((record.width, -record.figures["psnr"], record.label, counted, timed))
    for width, psnr, label, counted, timed in sorted(rows, key=lambda row: row[:3]):
        cost = " | ".join("" if value is None else f"{value:.2f}×" for value in (counted, timed))
        lines.append(f"| {width} px | {label} | {-psnr:.1f} dB | {cost} |")
    return "\n".join(lines) + "\n"


def _costs(record: QualityRecord, cell: CellRecord | None) -> tuple[float | None, float | None]:
    """Dense operations over those of a variant, and dense time over its time; None: not measured."""
    if record.steps_used is not None:
        counted = record.conditions["steps"] / record.steps_used
    elif cell is not None and cell.facts.get("flops_merged"):
        counted = cell.facts["flops_dense"] / cell.facts["flops_merged"]
    else:
        counted = None
    return counted, record.speedup if cell is None else cell.speedup


def _as_fast(speed: float, fewer: Sequence[tuple[float, float, str]]) -> str:
    def factor(other: tuple[float, float, str]) -> float:
        return max(speed / other[0], other[0] / speed)

    nearest = min(fewer, key=factor, default=None)
    if nearest is None or factor(nearest) > AS_FAST:
        return ""
    return f"{nearest[2]} steps: {nearest[1]:.1f} dB at {nearest[0]:.2f}×"


def settings_table() -> str:
    """Return closeness with one setting changed at a time, in Markdown: a row a setting, two columns a size."""
    records = (ROOT / "benchmarks" / "settings_cpu.jsonl").read_text(encoding="utf-8").splitlines()
    sizes = {line["size"]: line["psnr"] for line in map(json.loads, records)}
    heads = [f"{size} px, {len(psnr['base'])} prompts | difference" for size, psnr in sizes.items()]
    lines = [f"| setting | {' | '.join(heads)} |", f"|---|{'---:|---:|' * len(heads)}"]
    for name in next(iter(sizes.values())):
        row = name if name == "base" else f"`{words_with_new_names(name)}`"
        for psnr in sizes.values():
            more = [a - b for a, b in zip(psnr[name], psnr["base"], strict=True)]
            error = statistics.stdev(more) / len(more) ** 0.5
            against = "" if name == "base" else f"{statistics.mean(more):+.1f} ± {error:.1f}"
            row += f" | {statistics.mean(psnr[name]):.1f} | {against}"
        lines.append(f"| {row} |")
    return "\n".join(lines) + "\n"


def speeds_table() -> str:
    """Speed-up on the geometry of well-known models, in Markdown: the medians of all rounds."""
    dense, rows = _speeds()
    first = " | ".join(f"{statistics.median(taken):.1f} s" for taken in dense.values())
    lines = [f"| | {' | '.join(dense)} |", f"|---|{'---:|' * len(dense)}", f"| dense | {first} |"]

    def on_first_model(row: tuple[str, dict[str, list[float]]]) -> float:
        return next(statistics.median(row[1][name]) for name in dense if name in row[1])

    for variant, found in sorted(rows.items(), key=on_first_model):
        cells = (f"{statistics.median(found[name]):.2f}×" if name in found else "" for name in dense)
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _speeds() -> tuple[dict[str, list[float]], dict[str, dict[str, list[float]]]]:
    """Seconds of dense steps by model; and by variant and model, the speed-up over them in each round."""
    lines = (ROOT / "benchmarks" / "auto_cpu.jsonl").read_text(encoding="utf-8").splitlines()
    dense: dict[str, list[float]] = {}
    rows: dict[str, dict[str, list[float]]] = {}
    for record in map(json.loads, lines):
        name = f"{record['model']}, {record['size']} px, {record['steps']} steps"
        seconds = record["seconds"]
        base = seconds.pop("dense")
        dense.setdefault(name, []).extend(base)
        for variant in (name for name in seconds if not name.startswith(GONE)):
            taken = seconds[variant]
            ratios = [one / other for one, other in zip(base, taken, strict=True)]
            rows.setdefault(variant, {}).setdefault(name, []).extend(ratios)
    return dense, rows


def with_tables(drawn: Mapping[str, Chart]) -> dict[str, str]:
    """Return the documents that have such a table, by their path, with what it is to be."""
    made = {
        "benchmarks/results/closeness.md": {"closeness": tables(drawn)},
        "docs/methods/each-setting.md": {"settings": settings_table()},
        "docs/results.md": {"speeds": speeds_table()},
    }
    for page in sorted((ROOT / "docs" / "methods").glob("*.md")):
        if found := re.search(r"<!-- (points of (.*?)):", page.read_text(encoding="utf-8")):
            made[f"docs/methods/{page.name}"] = {found[1]: points_table(drawn, found[2].split(", "))}
    made["docs/methods/beside-cache-dit.md"] = {"points of cache-dit": joint_table()}
    return {
        name: TABLE.sub(
            lambda found, written=written: found[1] + written[found[2]] + found[3],
            (ROOT / name).read_text(encoding="utf-8"),
        )
        for name, written in made.items()
    }


def main() -> None:
    """Draw and write."""
    drawn = curves()
    for name, chart in drawn.items():
        path = ROOT / "docs" / f"price-{name}.svg"
        path.write_text(draw(chart), encoding="utf-8")
        print(path.relative_to(ROOT))
    for name, text in with_tables(drawn).items():
        (ROOT / name).write_text(text, encoding="utf-8")
        print(name)


if __name__ == "__main__":
    main()
