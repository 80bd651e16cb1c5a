"""The output of a search: the file with the plan, a table, and a picture of the worst prompt."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tokenmerge.config import SavedSettings, plan_content
from tokenmerge.report.summary import SIGNS
from tokenmerge_tools.files import write_atomically, write_json
from tokenmerge_tools.records.kinds import LOWER_IS_CLOSER
from tokenmerge_tools.reporting.tables import Table, TableRow, times
from tokenmerge_tools.sheets import difference, difference_gain, sample_sheet
from tokenmerge_tools.tune.rounds import estimates
from tokenmerge_tools.tune.runner import Search
from tokenmerge_tools.variants.variant import DENSE, Variant


def write_result(search: Search) -> list[str]:
    """Write the plan, and the picture of the worst prompt of the check if there was one.

    The result has a line for each file, with its path.
    """
    out = search.options.out
    write_json(out, _content(search))
    lines = [f"plan: {out}"]
    if any(look.name == search.chosen.name for look in search.looks):
        worst = out.with_name(f"{out.stem}-worst.png")
        lines.append(f"worst prompt, dense and merged: {worst} ({_write_worst(search, worst)})")
    return lines


def verdict(search: Search) -> str:
    """Return what was found, as sentences."""
    wanted, metric = f"speedup={search.options.speedup:g}", search.options.metric_name
    said = []
    if not search.reaches:
        said.append(f"{wanted} cannot be reached here: at most {times(search.counted[0])}, by operations.")
    if search.best == search.rule:
        if not search.was_search:
            plans = "plan was" if search.tried == 1 else "plans were"
            said.append(
                f"Not enough time: only {search.tried} {plans} compared with that of the default method, "
                f"so this was no search. Give --within {_minutes(search.enough)}, or take the default "
                f"method: tokenmerge.apply_token_merging(pipe, {wanted})."
            )
        else:
            said.append(f"Of {search.tried} plans, none was closer than that of the default method.")
        return " ".join(said)
    found = search.gain
    if found is None:
        ahead = "is ahead in the search, and was not checked on other prompts"
    else:
        size = f"{found[0]:+.2g}" + ("" if math.isinf(found[1]) else f" ± {found[1]:.2g}")
        looks = estimates(search.looks)[search.best.name].looks
        ahead = f"is ahead by {size} ({metric}) on {looks} other prompt{'s' * (looks > 1)}"
        if search.chosen != search.best:
            ahead += ", which is no gain; the file has the plan of the default method"
        elif looks == 1:
            ahead += ", which is not enough to be sure; raise --within"
    said.append(f"The best of {search.tried} plans {ahead}.")
    return " ".join(said)


def tuned_table(search: Search) -> Table:
    """Make a table of the best plan, the rule's, and what was drawn for comparison."""
    found, metric = estimates(search.looks), search.options.metric_name
    counted = dict(zip((search.rule.name, search.best.name), search.counted, strict=True))
    named = {search.rule.name: "default method"} | (
        {search.best.name: "found"} if search.best != search.rule else {}
    )
    named[search.chosen.name] += ", chosen"
    rows = []
    for name in dict.fromkeys((search.chosen.name, *counted, *search.variants())):
        one = found.get(name)
        if one is None and name not in counted:
            continue
        cells = [name, named.get(name, ""), times(counted[name]) if name in counted else "–"]
        if one is None:
            cells += ["–", "–", "0"]
        else:
            error = "" if math.isinf(one.error) else f" ± {one.error:.2g}"
            cells += [times(one.speedup), f"{one.value:.4g}{error}", str(one.looks)]
        rows.append(TableRow(tuple(cells)))
    arrow = "↓" if metric in LOWER_IS_CLOSER else "↑"
    conditions = search.evaluation.store.conditions
    title = (
        f"{conditions['model']}, {conditions['width']} × {conditions['height']}, {search.options.steps} "
        f"steps, {conditions['dtype']} on {conditions['device']}: a speed-up of {search.options.speedup:g}"
    )
    header = ("plan", "", "counted", "timed", f"{metric} {arrow}", "prompts")
    drawn = {sign for plan in (search.rule, search.best) for sign in plan.name.split()[0]}
    notes = (
        *(f"{sign}: {what}" for sign, what in SIGNS.items() if sign in drawn),
        f"timed: t_dense / t, with interleaved calls; {metric}: to the dense picture of the same seed, on "
        "prompts that the search did not draw; ± is one standard error",
    )
    return Table(title, header, tuple(rows), notes, words=2)


def _minutes(seconds: float) -> str:
    return "1h" if math.isinf(seconds) else f"{math.ceil(seconds / 60)}min"


def _content(search: Search) -> dict[str, Any]:
    saved = SavedSettings(search.chosen.config, search.found_for, search.options.speedup)
    rows = {
        name: {
            "prompts": one.looks,
            "speedup": one.speedup,
            search.options.metric_name: one.value,
            "error": None if math.isinf(one.error) else one.error,
        }
        for name, one in estimates(search.looks).items()
    }
    found = search.gain
    measured = {
        "plan": search.chosen.name,
        "default": search.rule.name,
        "gain": None if found is None else found[0],
        "tried": search.tried,
        "complete": search.complete,
        "conditions": dict(search.evaluation.store.conditions),
        "pictures": rows,
    }
    return {**plan_content(saved), "measured": measured}


def _write_worst(search: Search, path: Path) -> str:
    """Write the picture that is least close next to dense, and return its prompt and closeness."""
    metric, chosen = search.options.metric_name, search.chosen.name
    own = [look for look in search.looks if look.name == chosen]
    sign = -1 if metric in LOWER_IS_CLOSER else 1
    worst = min(own, key=lambda look: sign * look.value)
    item, store = search.evaluation.items[worst.item], search.evaluation.store
    dense = store.open(Variant(DENSE), item)
    merged = store.open(search.variants()[chosen], item)
    gain = difference_gain(dense, merged)
    value = f"{metric} {worst.value:.4g}"
    columns = [
        ("dense", f"{search.options.steps} steps"),
        ("merged", chosen),
        ("difference", f"|merged - dense| x {gain}"),
    ]
    caption = f"{item.prompt.text} · seed {item.seed} · {value}"
    sheet = sample_sheet(columns, [([dense, merged, difference(dense, merged, gain)], caption)])
    write_atomically(path, sheet.save)
    return f"{item.prompt.text!r}, seed {item.seed}, {value}"
