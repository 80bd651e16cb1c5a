"""Draw the price curves of README and methods.md from the records in benchmarks/results.

python docs/price_curves.py          # writes docs/price-MODEL-SIZE-STEPS-GUIDANCE.svg
"""

from __future__ import annotations

from pathlib import Path

from tokenmerge.reporting.curves import charts
from tokenmerge.reporting.newest import newest_cells, newest_figures
from tokenmerge.reporting.plots import draw
from tokenmerge.reporting.results import read_results

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Draw one curve for each model, size, number of steps and guidance that closeness was measured with."""
    results = read_results(sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")))
    (cells, _), (quality, _) = newest_cells(results.cells), newest_figures(results.quality)
    drawn = dict.fromkeys(
        (record.model, record.width, record.conditions["steps"], record.conditions["guidance"])
        for record in quality
    )
    for conditions in drawn:
        model, width, steps, guidance = conditions
        records = [
            record
            for record in quality
            if (record.model, record.width, record.conditions["steps"], record.conditions["guidance"])
            == conditions
        ]
        for chart in charts(cells, records):
            if chart.title.startswith("The price") and chart.x.startswith("PSNR"):
                path = ROOT / "docs" / f"price-{model}-{width}-{steps}-{guidance:g}.svg"
                path.write_text(draw(chart), encoding="utf-8")
                print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
