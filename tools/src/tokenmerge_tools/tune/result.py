"""The output of ``tokenmerge tune``: its file, a table, a strip of images, and the answer in a sentence."""

from __future__ import annotations

from functools import partial

from tokenmerge_tools.files import write_atomically, write_json
from tokenmerge_tools.records.kinds import LOWER_IS_CLOSER
from tokenmerge_tools.reporting.tables import Table, TableRow, times
from tokenmerge_tools.sheets import Row, sheet
from tokenmerge_tools.tune.runner import Tuning, variant_of
from tokenmerge_tools.tune.speeds import Closeness
from tokenmerge_tools.variants.variant import DENSE, Variant

_ROWS_OF_THE_STRIP = 3  # prompts
_UNITS = {"psnr": " dB", "lpips": ""}
_FORMATS = {"psnr": ".1f", "lpips": ".3f"}


def write_result(tuning: Tuning) -> None:
    """Write the file, and the strip of images."""
    options = tuning.options
    rows = []
    for speed in tuning.speeds:
        label = variant_of(speed).label
        found = tuning.closeness(label)
        rows.append({"speedup": speed, "by_clock": tuning.by_clock(label), options.metric: found._asdict()})
    measured = {
        "goal": None if options.goal is None else {options.metric: options.goal},
        "prompts": options.items,
        "complete": tuning.complete,
        "conditions": dict(tuning.evaluation.store.conditions),
        "speeds": rows,
    }
    write_json(options.out, {**tuning.tuned().content(), "measured": measured})
    _write_strip(tuning)


def answer(tuning: Tuning) -> str:
    """Return what was found, in a sentence."""
    options = tuning.options
    metric = options.metric
    if tuning.answer is None:
        return (
            f"No speed that was tried keeps {_value(options.goal or 0.0, metric)} in 9 of 10 prompts: take "
            "an easier goal, or more steps."
        )
    label = variant_of(tuning.answer).label
    found = tuning.closeness(label)
    least = "at most" if metric in LOWER_IS_CLOSER else "at least"
    take = "Measured" if options.goal is None else "Take"
    text = (
        f"{take} speedup={tuning.answer:g}: 9 of 10 prompts keep {least} {_value(found.kept, metric)} to "
        f"dense, at {times(tuning.by_clock(label))} by the clock"
    )
    fewer = tuning.fewer(tuning.answer)
    if fewer is not None and (fewer.label, options.items - 1) in tuning.images:
        steps = fewer.steps(options.steps)
        mean = _value(tuning.closeness(fewer.label).mean, metric)
        mean_of_speed = _value(found.mean, metric)
        text += f"; {steps} steps of the same time have {mean} in the mean, and this {mean_of_speed}"
    if not tuning.reaches:
        most = times(tuning.by_operations(tuning.answer))
        text = f"speedup={tuning.answer:g} cannot be reached here: at most {most}, by operations. {text}"
    return f"{text}."


def tuned_table(tuning: Tuning) -> Table:
    """Make a table of the speeds that were drawn, beside fewer steps of the same time."""
    options = tuning.options
    metric = options.metric
    rows = []
    for speed in tuning.speeds:
        label = variant_of(speed).label
        fewer = tuning.fewer(speed)
        beside = "–"
        if fewer is not None and (fewer.label, options.items - 1) in tuning.images:
            steps = fewer.steps(options.steps)
            beside = f"{steps} steps: {_range(tuning.closeness(fewer.label), metric)}"
        chosen = options.goal is not None and speed == tuning.answer
        cells = (
            f"{speed:g}{', chosen' if chosen else ''}",
            times(tuning.by_operations(speed)),
            times(tuning.by_clock(label)),
            _range(tuning.closeness(label), metric),
            beside,
        )
        rows.append(TableRow(cells, best=chosen))
    conditions = tuning.evaluation.store.conditions
    title = (
        f"{conditions['model']}, {conditions['width']} × {conditions['height']}, {options.steps} steps, "
        f"{conditions['dtype']} on {conditions['device']}, {options.items} prompts"
    )
    arrow = "↓" if metric in LOWER_IS_CLOSER else "↑"
    name = {"psnr": "PSNR", "lpips": "LPIPS"}[metric]
    closeness = f"{name} to dense {arrow}"
    header = ("speedup", "by operations", "by the clock", closeness, "fewer steps of the same time")
    notes = ("the range in parentheses is where 9 of 10 further prompts are expected",)
    return Table(title, header, tuple(rows), notes)


def _range(found: Closeness, metric: str) -> str:
    form = _FORMATS[metric]
    return f"{_value(found.mean, metric)} ({found.low:{form}} to {found.high:{form}})"


def _value(value: float, metric: str) -> str:
    return f"{value:{_FORMATS[metric]}}{_UNITS[metric]}"


def _write_strip(tuning: Tuning) -> None:
    """Write the images of some prompts side by side: dense, each speed, and fewer steps beside the answer."""
    options = tuning.options
    speed = tuning.answer or tuning.speeds[0]
    drawn: list[tuple[str, Variant]] = [("dense", Variant(DENSE))]
    drawn += [(f"{one:g} times", variant_of(one)) for one in tuning.speeds]
    fewer = tuning.fewer(speed)
    if fewer is not None and (fewer.label, options.items - 1) in tuning.images:
        drawn.append((f"{fewer.steps(options.steps)} steps", fewer))
    columns = [(title, "") for title, _ in drawn]
    rows: list[Row] = []
    for item in range(min(_ROWS_OF_THE_STRIP, options.items)):
        images = [tuning.easel.picture(variant, item) for _, variant in drawn]
        captions = [""]
        for _, variant in drawn[1:]:
            value = tuning.images[variant.label, item]["metrics"][options.metric]
            captions.append(_value(value, options.metric))
        rows.append((images, captions))
    write_atomically(options.strip, partial(sheet(columns, rows).save, format="png"))
