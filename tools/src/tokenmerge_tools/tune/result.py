"""The output of a search: the file with the plan, and a table."""

from __future__ import annotations

import math

from tokenmerge.config import SavedSettings, plan_content
from tokenmerge.report.notes import SIGNS
from tokenmerge_tools.files import write_json
from tokenmerge_tools.records.kinds import LOWER_IS_CLOSER
from tokenmerge_tools.reporting.tables import Table, TableRow, times
from tokenmerge_tools.tune.rounds import estimates
from tokenmerge_tools.tune.runner import Search


def write_result(search: Search) -> None:
    """Write the file with the plan."""
    saved = SavedSettings(search.chosen.config, search.found_for, search.options.speedup)
    rows = {}
    for name, one in estimates(search.looks).items():
        rows[name] = {
            "prompts": one.looks,
            "speedup": one.speedup,
            search.options.metric_name: one.value,
            "error": None if math.isinf(one.error) else one.error,
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
    write_json(search.options.out, {**plan_content(saved), "measured": measured})


def verdict(search: Search) -> str:
    """Return what was found, as sentences."""
    wanted = f"speedup={search.options.speedup:g}"
    metric = search.options.metric_name
    said = []
    if not search.reaches:
        said.append(f"{wanted} cannot be reached here: at most {times(search.counted[0])}, by operations.")
    if search.best == search.rule:
        if not search.was_search:
            plans = "plan was" if search.tried == 1 else "plans were"
            enough = "1h" if math.isinf(search.enough) else f"{math.ceil(search.enough / 60)}min"
            said.append(
                f"Not enough time: only {search.tried} {plans} compared with that of the default method, "
                f"so this was no search. Give --within {enough}, or take the default "
                f"method: tokenmerge.apply_token_merging(pipe, {wanted})."
            )
        else:
            said.append(f"Of {search.tried} plans, none was closer than that of the default method.")
        return " ".join(said)
    found = search.gain
    if found is None:
        ahead = "is ahead in the search, and was not checked on other prompts"
    else:
        lead, error = found
        size = f"{lead:+.2g}" if math.isinf(error) else f"{lead:+.2g} ± {error:.2g}"
        looks = estimates(search.looks)[search.best.name].looks
        prompts = "prompt" if looks == 1 else "prompts"
        ahead = f"is ahead by {size} ({metric}) on {looks} other {prompts}"
        if search.chosen != search.best:
            ahead += ", which is no gain; the file has the plan of the default method"
        elif looks == 1:
            ahead += ", which is not enough to be sure; raise --within"
    said.append(f"The best of {search.tried} plans {ahead}.")
    return " ".join(said)


def tuned_table(search: Search) -> Table:
    """Make a table of the best plan, the rule's, and what was drawn for comparison."""
    found = estimates(search.looks)
    metric = search.options.metric_name
    counted = dict(zip((search.rule.name, search.best.name), search.counted, strict=True))
    steps = search.options.steps
    fewer = {label: steps / spec.steps(steps) for label, spec in search.variants().items()}
    named = {search.best.name: "found", search.rule.name: "default method"}
    named[search.chosen.name] += ", chosen"
    rows = []
    for name in dict.fromkeys((search.chosen.name, *counted, *search.variants())):
        one = found.get(name)
        if one is None and name not in counted:
            continue
        cells = [name, named.get(name, ""), times({**fewer, **counted}[name])]
        if one is None:
            cells += ["–", "–", "0"]
        else:
            error = "" if math.isinf(one.error) else f" ± {one.error:.2g}"
            cells += [times(one.speedup), f"{one.value:.4g}{error}", str(one.looks)]
        rows.append(TableRow(tuple(cells)))
    arrow = "↓" if metric in LOWER_IS_CLOSER else "↑"
    conditions = search.evaluation.store.conditions
    where = f"{conditions['model']}, {conditions['width']} × {conditions['height']}, {steps} steps"
    title = (
        f"{where}, {conditions['dtype']} on {conditions['device']}: a speed-up of {search.options.speedup:g}"
    )
    header = ("plan", "which", "counted", "timed", f"{metric} {arrow}", "prompts")
    drawn = {sign for plan in (search.rule, search.best) for sign in plan.name.split()[0]}
    notes = (
        *(f"{sign}: {what}" for sign, what in SIGNS.items() if sign in drawn),
        f"timed: t_dense / t, with interleaved calls; {metric}: to the dense image of the same seed, on "
        "prompts that the search did not draw; ± is one standard error",
    )
    return Table(title, header, tuple(rows), notes, words=2)
