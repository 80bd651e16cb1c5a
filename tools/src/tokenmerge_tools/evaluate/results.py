"""The results of an evaluation: quality records, and sample pictures for the report."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import torch

from tokenmerge_tools.evaluate.distances import Features
from tokenmerge_tools.evaluate.evaluation import Evaluation
from tokenmerge_tools.evaluate.measure import Measured, not_told_apart
from tokenmerge_tools.evaluate.metrics import Metrics
from tokenmerge_tools.evaluate.picture_store import PictureStore
from tokenmerge_tools.evaluate.prompts import Item
from tokenmerge_tools.records.kinds import LOWER_IS_CLOSER, QualityRecord, SampleRecord, key_of
from tokenmerge_tools.variants.variant import DENSE, FEWER_STEPS, Variant


def quality_records(
    evaluation: Evaluation,
    metrics: Metrics,
    measured: Mapping[str, Measured],
    reference: Features | None,
    known: Mapping[str, QualityRecord | SampleRecord],
) -> list[QualityRecord]:
    """Make the records of each variant, for all pictures and then for each category.

    Values in known records of earlier runs are kept unless they were measured again. ``reference`` has the
    features of the reference pictures; None: sets of pictures are compared with the dense ones.
    """
    now = {*(metric.name for metric in metrics.of_pictures), *metrics.of_sets}
    categories = dict.fromkeys([None, *(item.prompt.category for item in evaluation.items)])
    records = []
    for variant, category in product(evaluation.variants, categories):
        record = _record(evaluation, metrics, measured, reference, variant, category)
        earlier = known.get(record.key)
        if isinstance(earlier, QualityRecord):
            undefined = now - record.figures.keys()
            figures, errors = {**earlier.figures, **record.figures}, {**earlier.errors, **record.errors}
            record = dataclasses.replace(
                record,
                figures={name: value for name, value in figures.items() if name not in undefined},
                errors={name: value for name, value in errors.items() if name not in undefined},
                measured_with={**earlier.measured_with, **record.measured_with},
            )
        records.append(record)
    return records


def _record(
    evaluation: Evaluation,
    metrics: Metrics,
    measured: Mapping[str, Measured],
    reference: Features | None,
    variant: Variant,
    category: str | None,
) -> QualityRecord:
    rows = [i for i, item in enumerate(evaluation.items) if category in (None, item.prompt.category)]
    own, is_dense, dense = measured[variant.label], variant.name == DENSE, measured[DENSE]
    distances = {}
    if category is None and not (is_dense and reference is None):  # a category has too few pictures
        of_dense = {network: torch.cat(parts) for network, parts in dense.features.items()}
        distances = own.distances(metrics, of_dense if reference is None else reference)
    figures = own.figures(metrics, rows, distances)
    speedups = [] if is_dense else own.speedups(dense, rows)
    quartiles = np.quantile(speedups, (0.25, 0.5, 0.75)).tolist() if speedups else None
    conditions = dict(evaluation.store.conditions)
    measured_with = dict(metrics.networks)
    if evaluation.reference is not None:
        measured_with |= {n: f"{measured_with[n]}, against {evaluation.reference}" for n in metrics.of_sets}
    notes = []
    if (steps := variant.steps(conditions["steps"])) != conditions["steps"]:
        notes.append(f"{steps} of {conditions['steps']} steps")
    if figures.equal:
        notes.append(
            f"{figures.equal} of {len(rows)} pictures equal dense in every pixel; their PSNR is "
            "infinite and not in the mean"
        )
    for name in figures.undefined:
        notes.append(f"{name} is left out, because it is not a finite number for some pictures")
    if len(own.configs) > 1:  # a method may choose by measurements of the device, which can change
        notes.append(
            f"its pictures were drawn with {len(own.configs)} different settings, which the method chose at "
            "different times; delete the pictures, and the same command draws all alike"
        )
    about = [f"{variant.label}: {note}" for note in notes]
    if is_dense and category is None:
        about += _comparisons(metrics, measured)
        about += [f"{label} is left out: {reason}" for label, reason in evaluation.left_out.items()]
    texts = [prompt.text for prompt in evaluation.prompts]
    return QualityRecord(
        **{name: conditions.pop(name) for name in ("model", "width", "height")},
        variant=variant.name,
        settings=dict(variant.settings),
        figures=figures.values,
        images=len(rows),
        category=category,
        conditions={
            **conditions,
            "prompts": {"count": len(texts), "key": key_of({"prompts": texts})},
            "seeds": sorted({item.seed for item in evaluation.items}),
        },
        speedup=quartiles and quartiles[1],
        speedup_quartiles=quartiles and (quartiles[0], quartiles[2]),
        steps_used=steps if variant.name == FEWER_STEPS else None,
        measured_with=measured_with,
        config=json.loads(*own.configs) if len(own.configs) == 1 else None,
        notes=tuple(about),
        errors=figures.errors,
        cost=_cost(evaluation, variant, own, rows),
        finished=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def _cost(evaluation: Evaluation, variant: Variant, own: Measured, rows: Sequence[int]) -> dict[str, float]:
    costs = [own.costs[row] for row in rows]
    found = {name: max(cost[name] for cost in costs if name in cost) for cost in costs for name in cost}
    if counted := [cost["counted"] for cost in costs if "counted" in cost]:
        found["counted"] = statistics.harmonic_mean(counted)
    if variant.label in evaluation.counted:
        found["counted"] = evaluation.counted[variant.label]
    if seconds := [own.seconds[row] for row in rows if math.isfinite(own.seconds[row])]:
        found["seconds"] = statistics.median_low(seconds)
    return found


def _comparisons(metrics: Metrics, measured: Mapping[str, Measured]) -> list[str]:
    """Say which variant is the best in each metric, and which ones the noise does not tell from it."""
    notes = []
    for metric in (one.name for one in metrics.of_pictures):
        for best, alike in not_told_apart(measured, metric, metric in LOWER_IS_CLOSER).items():
            noise = "by more than its noise" if not alike else f"but within the noise of {', '.join(alike)}"
            notes.append(f"{metric}: {best} is the best, {noise} (two standard errors, paired by picture)")
    return notes


def sample_records(
    items: Sequence[Item], variants: Sequence[Variant], store: PictureStore
) -> list[SampleRecord]:
    """Make a record for each item and each variant except dense, which must come first."""
    dense, *others = variants
    return [
        SampleRecord(
            prompt=item.prompt.text,
            seed=item.seed,
            variant=variant.name,
            settings=dict(variant.settings),
            dense=store.relative(store.picture(dense, item)),
            image=store.relative(store.picture(variant, item)),
        )
        for item in items
        for variant in others
    ]
