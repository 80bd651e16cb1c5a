"""Draw the price curves of README and methods.md, and write the latter's table, from benchmarks/results.

python docs/price_curves.py          # writes docs/price-MODEL-SIZE-STEPS-GUIDANCE.svg and docs/methods.md
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tokenmerge.reporting.curves import Chart, charts
from tokenmerge.reporting.newest import newest_cells, newest_figures
from tokenmerge.reporting.plots import draw
from tokenmerge.reporting.results import read_results

ROOT = Path(__file__).parent.parent
TABLE = re.compile(r"(<!-- closeness.*?-->\n).*?(<!-- end -->)", flags=re.DOTALL)


def curves() -> dict[str, Chart]:
    """One for each model, size, number of steps and guidance that closeness was measured with, by its name."""
    results = read_results(sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")))
    (cells, _), (quality, _) = newest_cells(results.cells), newest_figures(results.quality)
    found: dict[str, list] = {}
    for record in quality:
        conditions = record.conditions
        name = f"{record.model}-{record.width}-{conditions['steps']}-{conditions['guidance']:g}"
        found.setdefault(name, []).append(record)
    return {
        name: chart
        for name, records in found.items()
        for chart in charts(cells, records)
        if chart.title.startswith("The price") and chart.x.startswith("PSNR")
    }


def table(drawn: Mapping[str, Chart]) -> str:
    """Closeness and speed-up of every point of every curve, in Markdown: a row for each method."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for name, chart in drawn.items():
        for line in chart.lines:
            for (closeness, speed), label in zip(line.points, line.labels, strict=True):
                rows.setdefault((line.name, label), {})[name] = f"{closeness:.1f} at {speed:.2f}×"
    heads = [re.sub(r"-(\d+)-(\d+)-(.*)", r", \1 px, \2 steps, guidance \3", name) for name in drawn]
    lines = [f"| method | | {' | '.join(heads)} |", f"|---|---|{'---:|' * len(heads)}"]
    for (method, label), values in sorted(rows.items(), key=lambda row: (row[0][0], float(row[0][1] or 0))):
        lines.append(f"| {method} | {label} | {' | '.join(values.get(name, '') for name in drawn)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Draw and write."""
    drawn = dict(sorted(curves().items()))
    for name, chart in drawn.items():
        path = ROOT / "docs" / f"price-{name}.svg"
        path.write_text(draw(chart), encoding="utf-8")
        print(path.relative_to(ROOT))
    methods = ROOT / "docs" / "methods.md"
    text = methods.read_text(encoding="utf-8")
    methods.write_text(TABLE.sub(lambda found: found[1] + table(drawn) + found[2], text), encoding="utf-8")


if __name__ == "__main__":
    main()
