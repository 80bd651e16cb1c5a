"""The output of a search: the file of settings, a table, a chart, and a picture of the worst prompt."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

from tokenmerge.config import FoundFor
from tokenmerge.config.json_file import VERSION
from tokenmerge.errors import MissingExtraError
from tokenmerge_tools.files import write_atomically, write_json, write_text
from tokenmerge_tools.reporting.curves import AGAINST_CLOSENESS, Chart, Line
from tokenmerge_tools.reporting.plots import draw
from tokenmerge_tools.reporting.tables import Table, TableRow, times
from tokenmerge_tools.sheets import difference, difference_gain, sample_sheet
from tokenmerge_tools.tune.measurements import Estimate, estimates
from tokenmerge_tools.tune.runner import Search
from tokenmerge_tools.tune.search import ranking
from tokenmerge_tools.variants.variant import DENSE, Variant

_SHOWN = 8


def write_result(search: Search) -> list[str]:
    """Write the settings, the chart of speed-up against closeness, and the picture of the worst prompt.

    The result has a line for each file, with its path, or with the reason why it was not written.
    """
    out = search.options.out
    write_json(out, _content(search))
    lines = [f"settings: {out}"]
    curve = out.with_suffix(".svg")
    try:
        write_text(curve, draw(_chart(search)))
        lines.append(f"chart: {curve}")
    except MissingExtraError as error:
        lines.append(f"no chart: {error}")
    worst = out.with_name(f"{out.stem}-worst.png")
    lines.append(f"worst prompt, dense and merged: {worst} ({_write_worst(search, worst)})")
    return lines


def python_lines(search: Search) -> str:
    """Return the line of Python that applies the settings."""
    return f"tokenmerge.apply_token_merging(pipe, {str(search.options.out)!r})"


def tuned_table(search: Search) -> Table:
    """Make a table of the best settings, and of the baselines."""
    decision, goal = search.decision, search.goal
    assert decision is not None
    found = estimates(search.looks)
    rivals = [name for name in found if search.candidates[name].entry.rival]
    own = ranking([one for name, one in found.items() if name not in rivals], goal)
    own.sort(key=lambda name: (name != decision.name, -found[name].looks))
    shown = own[:_SHOWN]
    auto = [name for name in own if search.candidates[name].entry.group]
    shown += auto[:1] if not set(auto) & set(shown) else []
    by_group: dict[str, list[Estimate]] = {}
    for name in rivals:
        by_group.setdefault(search.candidates[name].entry.group, []).append(found[name])
    for group in by_group.values():
        shown.append(max(group, key=lambda one: (one.looks, -ranking(group, goal).index(one.name))).name)
    rows = []
    for one in (found[name] for name in shown):
        speedup = f"{times(one.speedup)} ± {one.speedup_error:.2f}"
        cells = (one.name, _verdict(search, one), speedup, _closeness(search, one), str(one.looks))
        rows.append(TableRow(cells))
    arrow = "↓" if goal.lower_is_closer else "↑"
    conditions = search.evaluation.store.conditions
    title = f"{_pictures(search)}, {conditions['dtype']} on {conditions['device']}: {goal}"
    header = ("setting", "", "speed-up", f"{goal.metric} {arrow}", "pictures")
    notes = (
        "± is one standard error; speed-up is t_dense / t, with interleaved calls; closeness is to the dense "
        "picture of the same seed",
        f"{len(found)} settings were measured with {len(search.looks)} pictures, baselines included",
    )
    return Table(title, header, tuple(rows), notes, words=2)


def _pictures(search: Search) -> str:
    conditions = search.evaluation.store.conditions
    size = f"{conditions['width']} × {conditions['height']}"
    return f"{conditions['model']}, {size}, {search.options.steps} steps"


def _closeness(search: Search, one: Estimate) -> str:
    error = "" if math.isinf(one.closeness_error) else f" ± {one.closeness_error:.2g}"
    return f"{search.goal.closeness(one.closeness):.4g}{error}"


def _verdict(search: Search, one: Estimate) -> str:
    decision = search.decision
    assert decision is not None
    if one.name == decision.name:
        if not decision.reached:
            return "nearest to the goal"
        if one.looks == 1:
            return "chosen; one picture is not enough to be sure"
        return "chosen" if decision.sure else "chosen; reaches the goal within the noise"
    if one.name in decision.ties:
        return "as good within the noise"
    value, _, _ = one.objectives(search.goal.speedup is not None)
    return "" if value >= search.goal.least else "misses the goal"


def _content(search: Search) -> dict[str, Any]:
    decision, goal = search.decision, search.goal
    assert decision is not None
    config = search.configs[decision.name]
    conditions = {**search.evaluation.store.conditions, "scheduler": search.scheduler}
    measured = [
        {
            "setting": one.name,
            "pictures": one.looks,
            "speedup": one.speedup,
            "speedup_error": one.speedup_error,
            goal.metric: goal.closeness(one.closeness),
            f"{goal.metric}_error": None if math.isinf(one.closeness_error) else one.closeness_error,
        }
        for one in estimates(search.looks).values()
    ]
    return {
        "version": VERSION,
        "settings": config.to_dict(),
        "tuned": {
            "found_for": dataclasses.asdict(FoundFor(search.model, *search.latent, search.options.steps)),
            "setting": decision.name,
            "goal": dataclasses.asdict(goal),
            "reached": decision.reached,
            "reached_by_a_standard_error": decision.sure,
            "complete": search.complete,
            "conditions": conditions,
            "measured": sorted(measured, key=lambda one: one["setting"] != decision.name),
        },
    }


def _chart(search: Search) -> Chart:
    decision, goal = search.decision, search.goal
    assert decision is not None
    families: dict[str, list[Estimate]] = {}
    for one in estimates(search.looks).values():
        families.setdefault(search.candidates[one.name].entry.family, []).append(one)
    lines = []
    for family, members in families.items():
        members.sort(key=lambda one: one.speedup)
        points = tuple((goal.closeness(one.closeness), one.speedup) for one in members)
        lines.append(Line(family, points))
        if chosen := [one for one in members if one.name == decision.name]:
            point = goal.closeness(chosen[0].closeness), chosen[0].speedup
            lines.append(Line(f"chosen: {decision.name}", (point,), ("chosen",)))
    closer = "lower" if goal.lower_is_closer else "higher"
    return Chart(
        AGAINST_CLOSENESS + _pictures(search),
        f"{goal.metric.upper()}, {closer} is better",
        "speed-up, t_dense / t",
        tuple(lines),
        ("dense", 1.0) if goal.speedup is None else ("goal", goal.speedup),
        goal.metric,
    )


def _write_worst(search: Search, path: Any) -> str:
    """Write the picture that is least close next to dense, and return its prompt and closeness."""
    assert search.decision is not None
    own = [look for look in search.looks if look.name == search.decision.name]
    worst = min(own, key=lambda look: look.closeness)
    item = search.evaluation.items[worst.item]
    store = search.evaluation.store
    dense = store.open(Variant(DENSE), item)
    merged = store.open(search.candidates[worst.name].variant, item)
    gain = difference_gain(dense, merged)
    value = f"{search.goal.metric} {search.goal.closeness(worst.closeness):.4g}"
    caption = f"{item.prompt.text} · seed {item.seed} · {value}"
    columns = [
        ("dense", f"{search.options.steps} steps"),
        ("merged", worst.name),
        ("difference", f"|merged - dense| x {gain}"),
    ]
    sheet = sample_sheet(columns, [([dense, merged, difference(dense, merged, gain)], caption)])
    write_atomically(path, partial(sheet.save))
    return f"{item.prompt.text!r}, seed {item.seed}, {value}"
