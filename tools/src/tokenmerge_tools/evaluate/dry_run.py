"""Says how many pictures an evaluation draws, and how long that takes, before it draws any."""

from __future__ import annotations

import math
import statistics

from tokenmerge_tools.evaluate.evaluation import EvaluateOptions, plan_evaluation
from tokenmerge_tools.pipelines.settings import resolve_device


def dry_run(options: EvaluateOptions, seconds: float | None) -> list[str]:
    """Return lines about what is to be drawn. ``seconds`` are those of a dense picture.

    None: the median of the dense pictures that an earlier run of the same command timed.
    """
    evaluation = plan_evaluation(options, resolve_device(options.device))
    store, items, variants = evaluation.store, evaluation.items, evaluation.variants
    left = {v: sum(not store.picture(v, item).exists() for item in items) for v in variants}
    total, pictures = len(items) * len(variants), "videos" if evaluation.frames else "pictures"
    lines = [
        f"{len(variants)} variants × {len(evaluation.prompts)} prompts × {options.seeds} seeds: {total:,} "
        f"{pictures}, of which {sum(left.values()):,} are not drawn yet",
    ]
    origin = "given"
    if seconds is None:
        dense = (item for item in items if store.picture(variants[0], item).exists())
        timed = [one for one in (store.seconds(variants[0], item) for item in dense) if math.isfinite(one)]
        if not timed:
            return [
                *lines,
                "how long they take is unknown: give --seconds-per-picture, or run the same command with "
                "--limit 1 first, which times a dense picture",
            ]
        seconds, origin = statistics.median(timed), f"measured on {len(timed)} {pictures}"
    hours = sum(n * seconds / evaluation.counted.get(v.label, 1.0) for v, n in left.items()) / 3600
    guessed = [v.label for v in variants[1:] if v.label not in evaluation.counted]
    return [
        *lines,
        f"{hours:.3g} hours on this device, at {seconds:.3g} s for a dense picture ({origin})",
        *([f"reckoned as slow as dense: {', '.join(guessed)}"] if guessed else []),
    ]
