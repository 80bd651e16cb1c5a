"""Measures the images of an evaluation, averages over them, and makes the records."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tokenmerge_tools.evaluate.distances import Features, distance, features_of
from tokenmerge_tools.evaluate.evaluation import Evaluation
from tokenmerge_tools.evaluate.metrics import MOTION, Metrics
from tokenmerge_tools.evaluate.networks import Vision
from tokenmerge_tools.evaluate.picture_store import PictureStore
from tokenmerge_tools.evaluate.prompts import Item
from tokenmerge_tools.records.kinds import LOWER_IS_CLOSER, QualityRecord, SampleRecord, key_of
from tokenmerge_tools.sheets import as_tensor
from tokenmerge_tools.variants.variant import DENSE, FEWER_STEPS, Variant

if TYPE_CHECKING:
    from PIL.Image import Image


_QUARTILES = (0.25, 0.5, 0.75)


@dataclasses.dataclass
class Measured:
    """Measurements of the images or videos of one variant, in the order of the items.

    ``columns`` maps the name of each metric to its values. ``seconds`` has the time of each item, or NaN if
    it is unknown, and ``costs`` has what :meth:`PictureStore.cost` returns for it. ``configs`` has the
    settings that the items were drawn with, as JSON. ``features`` maps each network to its features of all
    images and frames.
    """

    columns: dict[str, list[float]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    seconds: list[float] = dataclasses.field(default_factory=list)
    costs: list[Mapping[str, float]] = dataclasses.field(default_factory=list)
    configs: set[str] = dataclasses.field(default_factory=set)
    features: dict[Vision, list[Tensor]] = dataclasses.field(default_factory=lambda: defaultdict(list))

    def figures(self, metrics: Metrics, reference: Features | None = None) -> Figures:
        """Average over the images, and compare the set of them with a reference."""
        values = dict[str, float]()
        errors = dict[str, float]()
        equal = 0
        for name in [*(metric.name for metric in metrics.of_pictures), *MOTION]:
            found = self.columns.get(name, [])
            if name == "psnr":
                equal = found.count(math.inf)
                found = [value for value in found if value != math.inf]
            if found:
                values[name] = float(np.mean(found))
            if len(found) > 1 and all(map(math.isfinite, found)):
                errors[name] = standard_error(found)
        if reference is not None:
            for name, network in metrics.of_sets.items():
                features = torch.cat(self.features[network])
                others = torch.cat(list(reference[network]))
                values[name] = distance(name, features, others)
        undefined = tuple(name for name, value in values.items() if not math.isfinite(value))
        values = {name: value for name, value in values.items() if name not in undefined}
        return Figures(values, equal, undefined, errors)

    def speedups(self, dense: Measured) -> list[float]:
        """Return the speed-up t_dense / t of each image, without unknown ones."""
        found = [one / other for one, other in zip(dense.seconds, self.seconds, strict=True)]
        return [speedup for speedup in found if math.isfinite(speedup)]


@dataclasses.dataclass(frozen=True)
class Figures:
    """Means over images. ``equal`` of them equal dense in every pixel, and their infinite PSNR is left out.

    ``errors`` has the standard error of each mean over at least two images. Metrics whose mean is not finite
    are named in ``undefined`` and left out of ``values``.
    """

    values: Mapping[str, float]
    equal: int
    undefined: tuple[str, ...] = ()
    errors: Mapping[str, float] = dataclasses.field(default_factory=dict)


def measure(
    batches: Sequence[Sequence[Item]], variants: Sequence[Variant], store: PictureStore, metrics: Metrics
) -> dict[str, Measured]:
    """Measure the images that were drawn, in batches, and return the results by label. Dense comes first."""
    found = {variant.label: Measured() for variant in variants}
    for items in batches:
        for group in [items] if store.length is None else ([item] for item in items):
            _add_rows(group, variants, store, metrics, found)
        for variant in variants:
            measurements = found[variant.label]
            measurements.seconds += [store.seconds(variant, item) for item in items]
            measurements.costs += [store.cost(variant, item) for item in items]
            configs = [store.config(variant, item) for item in items]
            measurements.configs |= {config for config in configs if config}
    return found


def _add_rows(
    items: Sequence[Item],
    variants: Sequence[Variant],
    store: PictureStore,
    metrics: Metrics,
    found: Mapping[str, Measured],
) -> None:
    """Add a row for each image. A video has one row, with means over its frames and its motion."""
    video = store.length is not None
    dense = _frames(items, variants[0], store)
    for variant in variants:
        measurements = found[variant.label]
        is_dense = variant == variants[0]
        images = dense if is_dense else _frames(items, variant, store)
        prompts = [items[0].prompt] * len(images) if video else [item.prompt for item in items]
        for metric in metrics.of_pictures:
            if not (is_dense and metric.beside_dense):
                values = metric.measure(images, dense, prompts).tolist()
                measurements.columns[metric.name] += [mean_of_frames(values)] if video else values
        if video and not is_dense:
            pixels = as_tensor(images)
            dense_pixels = as_tensor(dense)
            for name, measure_motion in MOTION.items():
                measurements.columns[name].append(float(measure_motion(pixels, dense_pixels)))
        for network in dict.fromkeys(metrics.of_sets.values()):
            measurements.features[network].append(network(images))


def _frames(items: Sequence[Item], variant: Variant, store: PictureStore) -> list[Image]:
    frames: list[Image] = []
    for item in items:
        frames += store.frames(variant, item)
    return frames


def mean_of_frames(values: Sequence[float]) -> float:
    """Average over frames. Frames that equal dense are left out, unless all do."""
    return float(np.mean([value for value in values if value != math.inf] or values))


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of at least two numbers."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5)


def not_told_apart(measured: Mapping[str, Measured], metric: str, lower: bool) -> dict[str, list[str]]:
    """Return the best variant in a metric, and the variants whose difference from it is within the noise.

    The differences are paired by image. The noise is two standard errors of their mean. The result is empty
    unless at least two variants have two images each.
    """
    sign = -1.0 if lower else 1.0
    found = {label: sign * np.array(one.columns.get(metric, [])) for label, one in measured.items()}
    means = {label: float(_finite(c).mean()) for label, c in found.items() if len(_finite(c)) > 1}
    if len(means) < 2:
        return {}
    best = max(means, key=means.__getitem__)
    with np.errstate(invalid="ignore"):  # the difference of two infinite PSNRs is not a number
        differences = {label: _finite(found[best] - found[label]) for label in means if label != best}
    pairs = {label: d.tolist() for label, d in differences.items() if len(d) > 1}
    differs = [label for label, d in pairs.items() if np.mean(d) > 2 * standard_error(d)]
    return {best: [label for label in differences if label not in differs]}


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def quality_records(
    evaluation: Evaluation,
    metrics: Metrics,
    measured: Mapping[str, Measured],
    known: Mapping[str, QualityRecord | SampleRecord],
) -> list[QualityRecord]:
    """Make the record of each variant.

    Sets of images are compared with the reference images, or with the dense ones if there are none.
    Values in known records of earlier runs are kept unless they were measured again.
    """
    now = {*(metric.name for metric in metrics.of_pictures), *metrics.of_sets}
    reference: Features = measured[DENSE].features
    if evaluation.reference is not None:
        reference = features_of(evaluation.reference, metrics.of_sets.values())
    records = []
    for variant in evaluation.variants:
        record = _record(evaluation, metrics, measured, reference, variant)
        earlier = known.get(record.key)
        if isinstance(earlier, QualityRecord):
            undefined = now - record.figures.keys()
            figures = {**earlier.figures, **record.figures}
            errors = {**earlier.errors, **record.errors}
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
    reference: Features,
    variant: Variant,
) -> QualityRecord:
    measurements = measured[variant.label]
    is_dense = variant.name == DENSE
    dense = measured[DENSE]
    figures = measurements.figures(metrics, None if reference is measurements.features else reference)
    speedups = [] if is_dense else measurements.speedups(dense)
    quartiles = np.quantile(speedups, _QUARTILES).tolist() if speedups else None
    conditions = dict(evaluation.store.conditions)
    measured_with = dict(metrics.networks)
    if evaluation.reference is not None:
        measured_with |= {n: f"{measured_with[n]}, against {evaluation.reference}" for n in metrics.of_sets}
    notes = []
    steps = variant.steps(conditions["steps"])
    if steps != conditions["steps"]:
        notes.append(f"{steps} of {conditions['steps']} steps")
    if figures.equal:
        notes.append(
            f"{figures.equal} of {len(evaluation.items)} images equal dense in every pixel; their PSNR is "
            "infinite and not in the mean"
        )
    for name in figures.undefined:
        notes.append(f"{name} is left out, because it is not a finite number for some images")
    # A method may choose by measurements of the device, which can change.
    if len(measurements.configs) > 1:
        notes.append(
            f"its images were drawn with {len(measurements.configs)} different settings, which the method "
            "chose at different times; delete the images, and the same command draws all alike"
        )
    about = [f"{variant.label}: {note}" for note in notes]
    prompts = list(evaluation.prompts)
    if is_dense:
        about += _comparisons(metrics, measured)
        about += [f"{label} is left out: {reason}" for label, reason in evaluation.left_out.items()]
    return QualityRecord(
        **{name: conditions.pop(name) for name in ("model", "width", "height")},
        variant=variant.name,
        settings=dict(variant.settings),
        figures=figures.values,
        images=len(evaluation.items),
        conditions={
            **conditions,
            "prompts": {"count": len(prompts), "key": key_of({"prompts": prompts})},
            "seeds": sorted({item.seed for item in evaluation.items}),
        },
        speedup=quartiles and quartiles[1],
        speedup_quartiles=quartiles and (quartiles[0], quartiles[2]),
        steps_used=steps if variant.name == FEWER_STEPS else None,
        measured_with=measured_with,
        config=json.loads(*measurements.configs) if len(measurements.configs) == 1 else None,
        notes=tuple(about),
        errors=figures.errors,
        cost=_cost(evaluation, variant, measurements),
        finished=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def _cost(evaluation: Evaluation, variant: Variant, measurements: Measured) -> dict[str, float]:
    costs = measurements.costs
    found: dict[str, float] = {}
    for cost in costs:
        for name, value in cost.items():
            found[name] = max(value, found.get(name, value))
    counted = [cost["counted"] for cost in costs if "counted" in cost]
    if counted:
        found["counted"] = statistics.harmonic_mean(counted)
    if variant.label in evaluation.counted:
        found["counted"] = evaluation.counted[variant.label]
    seconds = [one for one in measurements.seconds if math.isfinite(one)]
    if seconds:
        found["seconds"] = statistics.median_low(seconds)
    return found


def _comparisons(metrics: Metrics, measured: Mapping[str, Measured]) -> list[str]:
    """Say which variant is the best in each metric, and which ones differ from it by no more than the noise.

    Variants that are equal in every image are named together, and if all are equal, nothing is said.
    """
    notes = []
    for metric in (one.name for one in metrics.of_pictures):
        columns = {label: list(one.columns.get(metric, [])) for label, one in measured.items()}
        for best, alike in not_told_apart(measured, metric, metric in LOWER_IS_CLOSER).items():
            equal = [label for label, column in columns.items() if column == columns[best]]
            if len(equal) == sum(map(bool, columns.values())):
                continue
            others = [label for label in alike if label not in equal]
            noise = "by more than its noise" if not others else f"but within the noise of {', '.join(others)}"
            verb = "is" if len(equal) == 1 else "are equal and"
            said = f"{', '.join(equal)} {verb} the best, {noise}"
            notes.append(f"{metric}: {said} (two standard errors, paired by image)")
    return notes


def sample_records(
    items: Sequence[Item], variants: Sequence[Variant], store: PictureStore
) -> list[SampleRecord]:
    """Make a record for each item and each variant except dense, which must come first."""
    dense, *others = variants
    records = []
    for item in items:
        for variant in others:
            record = SampleRecord(
                prompt=item.prompt,
                seed=item.seed,
                variant=variant.name,
                settings=dict(variant.settings),
                dense=store.relative(store.picture(dense, item)),
                image=store.relative(store.picture(variant, item)),
            )
            records.append(record)
    return records
