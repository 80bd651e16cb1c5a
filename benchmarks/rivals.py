"""Every rival beside the default method on both bundled models, by `tokenmerge evaluate`.

`draw` draws prompts that no rule was fitted on, dense, with the default method, with fewer steps and with all
settings of all rivals, and counts the operations of each image. It begins with one prompt and the default
settings, goes on with settings that may come near the speeds compared, and draws other prompts only with
those that did.
`draw-without-merging` draws the model in which tokens merge at this size once more, with the default method
as it is on a device on which merging does not pay.
`time` times the same prompts with each variant of the speeds compared.
`page` writes docs/rivals.md, its charts and its tables, and a table each of docs/results.md and
docs/index.md. An interrupted run continues.

    python benchmarks/rivals.py draw       # about 45 minutes on one core that does nothing else
    python benchmarks/rivals.py draw-without-merging
    python benchmarks/rivals.py time
    python benchmarks/rivals.py page
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np

from tokenmerge import calibration
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs
from tokenmerge_tools.evaluate.evaluation import EvaluateOptions
from tokenmerge_tools.evaluate.runner import evaluate
from tokenmerge_tools.pipelines.loading import quiet_libraries
from tokenmerge_tools.records.file import read_lines, read_results
from tokenmerge_tools.records.kinds import QualityRecord
from tokenmerge_tools.reporting.curves import Chart, Line
from tokenmerge_tools.reporting.plots import figure_of
from tokenmerge_tools.variants.rivals import RIVALS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "rivals.md"
RESULTS = ROOT / "docs" / "results.md"
INDEX = ROOT / "docs" / "index.md"
TABLES = ROOT / "benchmarks" / "results" / "rivals.md"
DRAWN = ROOT / "benchmarks" / "rivals_cpu.jsonl"
TIMED = ROOT / "benchmarks" / "rivals_timed_cpu.jsonl"
UNMERGED = ROOT / "benchmarks" / "rivals_without_merging_cpu.jsonl"

SCENES = (("emoji-unet", 3.0), ("emoji-unet", 7.5), ("emoji-mmdit", 3.0), ("emoji-mmdit", 7.0))
MERGING = "emoji-mmdit"  # its tokens merge at this size, on a CPU
FIRST_PROMPT = 70
SEED = 46
SIZE = 128
STEPS = 20
SPEEDUPS = (1.2, 1.3, 1.5, 2.0, 2.5, 3.0, 4.0)
NEAR = (1.2, 3.3)  # speed-ups by operations of the settings that are drawn with all prompts
NOISE = 0.3  # dB
ROUNDING = 0.01  # of a speed-up that is taken for another one
OWN = ("dense", "auto", "fewer-steps")
NAMES = {"auto": "default method", "auto without merging": "default method without merging"}  # in tables

Scene = tuple[str, float]  # a model and a guidance scale


def draw(prompts: Iterable[int]) -> None:
    """Draw what is missing: the defaults, their ladders, and then more prompts."""
    for scene in SCENES:
        evaluate_scene(scene, 1, DRAWN, ["rivals"])
        evaluate_scene(scene, 1, DRAWN, list(ladders(records_of(DRAWN)[scene])))
    for count, scene in itertools.product(prompts, SCENES):
        evaluate_scene(scene, count, DRAWN, near(scene))


def draw_without_merging(prompts: Iterable[int]) -> None:
    """Draw the default method as on devices on which merging does not pay."""
    before = calibration.TOKENS_ON_CPU
    calibration.TOKENS_ON_CPU = 10**9
    try:
        for count, scene in itertools.product(prompts, SCENES):
            if scene[0] == MERGING:
                evaluate_scene(scene, count, UNMERGED, [])
    finally:
        calibration.TOKENS_ON_CPU = before


def time(prompts: Iterable[int]) -> None:
    """Time images of each variant of the speeds compared."""
    for count, scene in itertools.product(prompts, SCENES):
        evaluate_scene(scene, count, TIMED, near(scene), timed=True)


def evaluate_scene(scene: Scene, count: int, out: Path, rivals: Sequence[str], timed: bool = False) -> None:
    """Run `tokenmerge evaluate` with rivals, the default method and fewer steps."""
    quiet_libraries("benchmarks/rivals.py")
    model, guidance = scene
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.txt"
        file.write_text("\n".join(texts(count)), encoding="utf-8")
        options = EvaluateOptions(
            model=model,
            guidance=guidance,
            prompts=file,
            seed=SEED,
            size=(SIZE, SIZE),
            steps=STEPS,
            variants=("auto", "fewer-steps", *rivals),
            speedup=SPEEDUPS,
            batch=1,
            samples=0,
            timed=timed,
            out=out,
        )
        evaluate(options, partial(print, model, guidance, flush=True), print)


def ladders(records: Iterable[QualityRecord]) -> Iterator[str]:
    """Return settings of the rivals that ran: stronger ones if the default is too slow, and vice versa."""
    for record in records:
        kind = RIVALS.get(record.variant)
        if kind is not None and kind.number is not None:
            name, default = kind.number
            speed = record.cost["counted"]
            for value in kind.ladder:
                if (value >= default or speed >= NEAR[0]) and (value <= default or speed <= NEAR[1]):
                    yield f"{record.variant}:{name}={value}"


def near(scene: Scene) -> list[str]:
    found = [one for one in records_of(DRAWN)[scene] if one.variant not in OWN]
    return [spec_of(one) for one in found if NEAR[0] <= one.cost.get("counted", 1.0) <= NEAR[1]]


def texts(count: int) -> list[str]:
    glyphs = read_glyphs()
    chosen = choose_prompts(FIRST_PROMPT + count)[FIRST_PROMPT:]
    return [caption(glyphs[glyph].name, background) for glyph, background in chosen]


def spec_of(record: QualityRecord) -> str:
    own = ",".join(f"{name}={value}" for name, value in record.settings.items())
    return f"{record.variant}:{own}" if own else record.variant


def records_of(file: Path) -> dict[Scene, list[QualityRecord]]:
    """Return the records by model and guidance: of each variant, the one with the most images."""
    best: dict[Scene, dict[str, QualityRecord]] = defaultdict(dict)
    for record in read_results([file]).quality if file.exists() else ():
        own = best[record.model, record.conditions["guidance"]]
        if record.label not in own or own[record.label].images <= record.images:
            own[record.label] = record
    return {scene: list(own.values()) for scene, own in best.items()}


def without_merging(drawn: Mapping[Scene, Sequence[QualityRecord]]) -> dict[Scene, list[QualityRecord]]:
    """Return the records of the model that merges, with the default method as it is where nothing merges."""
    found = {}
    for scene, records in records_of(UNMERGED).items():
        others = [record for record in drawn[scene] if record.variant != "auto"]
        found[scene] = others + [record for record in records if record.variant == "auto"]
    return found


def points(
    records: Sequence[QualityRecord], times: Mapping[str, QualityRecord] | None = None
) -> Iterator[tuple[float, QualityRecord]]:
    """Return records by their speed-ups, without those of fewer images than dense has.

    The speed-ups are by operations, or by the clock where ``times`` has the timed records by label.
    """
    most = max(record.images for record in records)
    for record in records:
        if record.images == most and record.variant != "dense" and "psnr" in record.figures:
            speed = record.cost["counted"] if times is None else measured(record, times)
            if speed:
                yield speed, record


def measured(record: QualityRecord, times: Mapping[str, QualityRecord]) -> float | None:
    """Return the speed-up by the clock of a record, or None if it was not timed.

    Fewer images are timed than drawn, and a rival that decides from the image skips more in some than in
    others. So the speed-up by the clock is scaled by the operations of all images over those of the
    timed ones.
    """
    timed = times.get(record.label)
    if timed is None or not timed.speedup:
        return None
    return timed.speedup * record.cost["counted"] / timed.cost["counted"]


def leads(
    records: Sequence[QualityRecord], times: Mapping[str, QualityRecord] | None = None
) -> dict[str, float]:
    """Return by how many dB each variant is closer than the default method at its speed, one cell each."""
    beside, _ = beside_auto(list(points(records, times)))
    return {record.label: record.figures["psnr"] - own for record, _, own in beside}


def beside_auto(
    found: Sequence[tuple[float, QualityRecord]],
) -> tuple[list[tuple[QualityRecord, float, float]], list[QualityRecord]]:
    """Return each other variant with its speed-up and the PSNR of the default method there.

    Those that are not compared are returned beside them.

    A variant that is faster than the fastest of the default method is compared with that one if it is closer
    too, and one that is slower than the slowest if it is less close too. The others are not compared.
    """
    own = sorted((speed, record.figures["psnr"]) for speed, record in found if record.variant == "auto")
    speeds, psnr = zip(*own, strict=True)
    compared = []
    outside = []
    for speed, record in found:
        if record.variant == "auto":
            continue
        closeness = record.figures["psnr"]
        beaten = (speed > speeds[-1] and closeness > psnr[-1]) or (speed < speeds[0] and closeness < psnr[0])
        if speeds[0] - ROUNDING <= speed <= speeds[-1] + ROUNDING or beaten:
            compared.append((record, speed, float(np.interp(speed, speeds, psnr))))
        else:
            outside.append(record)
    return compared, outside


def fewer_steps() -> str:
    """Return a table of fewer steps beside the default method, each at the same speed-up by operations."""
    drawn = records_of(DRAWN)
    columns = {f"{model}, guidance {scale:g}": drawn[model, scale] for model, scale in SCENES}
    for (model, scale), records in sorted(without_merging(drawn).items()):
        columns[f"{model}, guidance {scale:g}, nothing merges"] = records
    cells: dict[tuple[int, str], dict[str, str]] = defaultdict(dict)
    for column, records in columns.items():
        for record, speed, own in beside_auto(list(points(records)))[0]:
            if record.variant == "fewer-steps":
                row = record.settings["steps"], f"{speed:.2f}×"
                cells[row][column] = f"{own:.1f} ({record.figures['psnr']:.1f})"
    rows = [f"| steps | by operations | {' | '.join(columns)} |"]
    rows.append("|---:|---:|" + "---:|" * len(columns))
    for (steps, speed), found in sorted(cells.items(), reverse=True):
        rows.append(f"| {steps} | {speed} | {' | '.join(found.get(column, '') for column in columns)} |")
    return "\n".join(rows)


def at_speed(speedup: float) -> str:
    """Return a table of the PSNR of each kind of variant at a speed by operations, between its settings.

    Of a kind whose settings are all faster or all slower, it has the nearest one.
    """
    drawn = records_of(DRAWN)
    unmerged = without_merging(drawn)
    cells = defaultdict[str, dict[Scene, str]](dict)
    for scene in SCENES:
        lines = {line.name: line.points for line in chart("", "", points(drawn[scene])).lines}
        if scene in unmerged:
            own = (point for point in points(unmerged[scene]) if point[1].variant == "auto")
            (line,) = chart("", "", own).lines
            lines["auto without merging"] = line.points
        for name, found in lines.items():
            speeds, psnr = zip(*found, strict=True)
            nearest = min(max(speedup, speeds[0]), speeds[-1])
            at = f" at {nearest:.2f}×" if abs(nearest - speedup) > ROUNDING else ""
            cells[name][scene] = f"{np.interp(nearest, speeds, psnr):.1f} dB{at}"
    rows = [
        f"| at {speedup:g}× | {' | '.join(f'`{model}`, guidance {scale:g}' for model, scale in SCENES)} |"
    ]
    rows.append("|---|" + "---:|" * len(SCENES))
    first = [name for name in (*NAMES, *OWN) if name in cells]
    others = sorted(cells.keys() - set(first), key=lambda name: (-len(cells[name]), name))
    for name in [*dict.fromkeys(first), *others]:
        row = " | ".join(cells[name].get(scene, "") for scene in SCENES)
        rows.append(f"| {NAMES.get(name, f'`{name}`')} | {row} |")
    return "\n".join(rows)


def table(records: Sequence[QualityRecord], times: Mapping[str, QualityRecord]) -> Iterator[str]:
    """Return a row for each variant: speeds, closeness, and how much closer than the default method it is."""
    found = leads(records)
    heads = ["by operations", "PSNR to dense", "against the default method"]
    if times:
        heads.insert(1, "by the clock")
    yield f"| variant | {' | '.join(heads)} |"
    yield "|---|" + "---:|" * len(heads)
    for speed, record in sorted(points(records), key=lambda point: (point[1].variant != "auto", point[0])):
        row = [record.label, f"{speed:.2f}×"]
        if times:
            own = measured(record, times)
            row.append(f"{own:.2f}×" if own else "")
        error = f" ± {record.errors['psnr']:.1f}" if "psnr" in record.errors else ""
        row.append(f"{record.figures['psnr']:.1f}{error} dB")
        lead = f"{found[record.label]:+.1f} dB" if record.label in found else ""
        row.append(lead.replace("-", "−"))
        yield f"| {' | '.join(row)} |"


def chart(title: str, axis: str, found: Iterable[tuple[float, QualityRecord]]) -> Chart:
    """Return closeness over speed-up, with a line for each variant and a point for each setting."""
    families: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for speed, record in found:
        families[record.variant].append((speed, record.figures["psnr"]))
    order = sorted(families, key=lambda name: (name not in OWN, name))
    return Chart(
        title,
        f"speed-up {axis}",
        "PSNR to dense, dB",
        tuple(Line(name, tuple(sorted(families[name]))) for name in order),
    )


def text() -> str:
    """Return the generated part of the page."""
    drawn = records_of(DRAWN)
    parts = [verdict(drawn, "by operations")]
    if TIMED.exists():
        parts.append(verdict(drawn, "by the clock"))
    unmerged = verdict(without_merging(drawn), "by operations")
    parts.append(f"**Where nothing merges**, only the figures of `{MERGING}` differ. {unmerged}")
    for scene in filter(drawn.get, SCENES):
        title = f"{scene[0]}, guidance {scene[1]:g}"
        dense = next(record for record in drawn[scene] if record.variant == "dense")
        parts += [
            f"## {title}",
            *(f"![Closeness over speed-up {axis}, {title}]({file.name})" for axis, file in pictures(scene)),
            f"{SIZE} px, {STEPS} steps, {dense.images} {'prompts' if dense.images > 1 else 'prompt'}.",
            left_out(scene),
        ]
    return "\n\n".join(filter(None, parts))


def verdict(drawn: Mapping[Scene, Sequence[QualityRecord]], axis: str) -> str:
    """Return how many settings are not closer than the default method at their speed, and the other names."""
    count = 0
    lines = []
    fewer = []
    outside = []
    for scene in filter(drawn.get, SCENES):
        times = times_of(scene) if axis == "by the clock" else None
        found = leads(drawn[scene], times)
        name_of_scene = f"{scene[0]}, guidance {scene[1]:g}"
        _, others = beside_auto(list(points(drawn[scene], times)))
        outside += [f"{record.label} on {name_of_scene}" for record in others]
        closer = [f"{name} ({dB:+.1f} dB)" for name, dB in found.items() if dB > NOISE]
        count += len(found) - len(closer)
        fewer += [dB for name, dB in found.items() if name.startswith("fewer-steps")]
        lines.append((len(found), f"- {name_of_scene}: {', '.join(closer) or 'none'}"))
    every = sum(cells for cells, _ in lines)
    first = (
        f"Of {every} settings, {count} are not closer than the default method at the same speed {axis} by "
        f"more than {NOISE} dB. {len(fewer)} of them are fewer steps, of which {sum(dB < 0 for dB in fewer)} "
        "are less close than the default method. These are closer:"
    )
    number = f"{len(outside)} settings are" if len(outside) != 1 else "1 setting is"
    last = f"{number} not compared, since the default method was drawn at no such speed: "
    last += f"{'; '.join(outside)}."
    if not outside:
        last = "No setting is slower than the slowest of the default method or faster than the fastest."
    return "\n\n".join([first, "\n".join(line for _, line in lines), last])


def closer_table() -> str:
    """Return a table of all settings that are closer than the default method at the same speed."""
    rows = ["| what was closer | on which model | at a speed-up of | by |", "|---|---|---:|---:|"]
    drawn = records_of(DRAWN)
    compared = [("by operations", scene, drawn[scene], "") for scene in SCENES]
    compared += [("by the clock", scene, drawn[scene], "") for scene in SCENES]
    unmerged = without_merging(drawn)
    compared += [("by operations", scene, own, ", where nothing merges") for scene, own in unmerged.items()]
    for axis, scene, records, which in compared:
        times = times_of(scene) if axis == "by the clock" else None
        beside, _ = beside_auto(list(points(records, times)))
        for record, speed, own in sorted(beside, key=lambda one: one[1]):
            lead = record.figures["psnr"] - own
            if lead > NOISE:
                what = f"`{record.label}`"
                if record.variant == "fewer-steps":
                    what = f"{record.settings['steps']} of {STEPS} steps of the unchanged model"
                where = f"`{scene[0]}`, guidance {scene[1]:g}{which}"
                rows.append(f"| {what} | {where} | {speed:.2f}× {axis} | {lead:.1f} dB |")
    return "\n".join(rows)


def times_of(scene: Scene) -> dict[str, QualityRecord]:
    """Return the timed records by label."""
    return {record.label: record for record in records_of(TIMED).get(scene, [])}


def tables() -> str:
    """Return the file of tables: for each model and guidance a row for each variant."""
    drawn = records_of(DRAWN)
    parts = [
        "# Other packages and papers",
        "[The page on them](../../docs/rivals.md) has charts, and says how these figures were measured.",
    ]
    for scene in filter(drawn.get, SCENES):
        title = f"## {scene[0]}, guidance {scene[1]:g}"
        parts += [title, "\n".join(table(drawn[scene], times_of(scene)))]
    return "\n\n".join(parts) + "\n"


def left_out(scene: Scene) -> str:
    """Return which rivals do not run on the model, from the notes of all runs."""
    lines = [line for _, line in read_lines(DRAWN) if line.get("variant") == "dense"]
    own = [line for line in lines if (line["model"], line["conditions"]["guidance"]) == scene]
    notes = itertools.chain.from_iterable(line["notes"] for line in own)
    names = dict.fromkeys(f"`{note.split()[0]}`" for note in notes if "is left out" in note)
    return f"Left out, since they do not run on this model: {', '.join(names)}." if names else ""


def pictures(scene: Scene) -> Iterator[tuple[str, Path]]:
    """Return what the speeds of each chart are, and its file."""
    yield "by operations", PAGE.with_name(f"rivals-{scene[0]}-{scene[1]:g}.png")
    if times_of(scene):
        yield "by the clock", PAGE.with_name(f"rivals-{scene[0]}-{scene[1]:g}-measured.png")


def written(page: str, part: str, what: str = "") -> str:
    """Return the page with one of its generated parts."""
    begin, end = f"<!-- {what}written by benchmarks/rivals.py -->\n", "<!-- end -->"
    head, _, rest = page.partition(begin)
    return f"{head}{begin}\n{part}\n\n{end}{rest.partition(end)[2]}"


def write_page() -> None:
    for scene, records in records_of(DRAWN).items():
        title = f"{scene[0]}, {SIZE} px, {STEPS} steps, guidance {scene[1]:g}"
        for axis, file in pictures(scene):
            found = points(records, times_of(scene) if axis == "by the clock" else None)
            drawn = chart(title, axis, found)
            with matplotlib.rc_context({"axes.grid": True, "grid.color": "#e4e4e4"}):
                figure_of(drawn).savefig(file, dpi=110, metadata={"Software": None})
    TABLES.write_text(tables(), encoding="utf-8")
    for page, part in {PAGE: text(), RESULTS: fewer_steps(), INDEX: closer_table()}.items():
        page.write_text(written(page.read_text(encoding="utf-8"), part), encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), at_speed(2.0), "at 2×, "), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("draw", "draw-without-merging", "time", "page"))
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[4], help="of draw and time, one run for each"
    )
    options = parser.parse_args()
    if options.what == "page":
        write_page()
    else:
        make = {"draw": draw, "draw-without-merging": draw_without_merging, "time": time}[options.what]
        make(options.prompts)


if __name__ == "__main__":
    main()
