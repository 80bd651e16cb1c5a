"""Measures the pictures of an evaluation, and averages over them."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokenmerge_tools.evaluate.distances import DISTANCES, Features, Network
from tokenmerge_tools.evaluate.metrics import MOTION, Metrics
from tokenmerge_tools.evaluate.picture_store import PictureStore
from tokenmerge_tools.evaluate.prompts import Item
from tokenmerge_tools.sheets import as_tensor
from tokenmerge_tools.variants.variant import DENSE, Variant

if TYPE_CHECKING:
    from PIL.Image import Image

SECONDS = "seconds"


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of n pictures or videos.

    ``costs`` has what :meth:`PictureStore.cost` says of each picture of a variant.
    ``columns`` has, by (variant, name of the metric), its values [n], and by (variant, ``SECONDS``) the
    seconds that each one took, NaN if unknown. ``configs`` has, by variant, the settings that pictures were
    drawn with, as JSON, and ``features`` those of all its pictures and frames.
    """

    columns: Mapping[tuple[str, str], Tensor]
    configs: Mapping[str, frozenset[str]]
    features: Mapping[str, Features] = dataclasses.field(default_factory=dict)
    costs: Mapping[str, Sequence[Mapping[str, float]]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Figures:
    """Means over pictures, without the infinite PSNR of those that ``equal`` dense in every pixel.

    ``errors`` has the standard errors of the means that are over two pictures or more.
    Metrics whose mean is not finite are named in ``undefined`` and left out of ``values``.
    """

    values: Mapping[str, float]
    equal: int
    images: int
    undefined: tuple[str, ...] = ()
    errors: Mapping[str, float] = dataclasses.field(default_factory=dict)


def measure(
    batches: Sequence[Sequence[Item]], variants: Sequence[Variant], store: PictureStore, metrics: Metrics
) -> Measured:
    """Measure what was drawn before, in batches. Dense comes first."""
    columns: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    configs: dict[str, set[str]] = defaultdict(set)
    costs: dict[str, list[Mapping[str, float]]] = defaultdict(list)
    features: dict[str, dict[Network, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    for items in batches:
        for group in [items] if store.length is None else ([item] for item in items):
            _add_rows(group, variants, store, metrics, columns, features)
        for variant in variants:
            seconds = [store.seconds(variant, item) for item in items]
            columns[variant.label, SECONDS].append(torch.tensor(seconds, dtype=torch.float64))
            costs[variant.label] += [store.cost(variant, item) for item in items]
            configs[variant.label] |= {found for item in items if (found := store.config(variant, item))}
    return Measured(
        {name: torch.cat(parts) for name, parts in columns.items()},
        {label: frozenset(found) for label, found in configs.items()},
        {label: {n: torch.cat(parts) for n, parts in found.items()} for label, found in features.items()},
        costs,
    )


def _add_rows(
    items: Sequence[Item],
    variants: Sequence[Variant],
    store: PictureStore,
    metrics: Metrics,
    columns: dict[tuple[str, str], list[Tensor]],
    features: dict[str, dict[Network, list[Tensor]]],
) -> None:
    """Add a row for each picture, or one for a video: means over its frames, and its motion.

    The features of all pictures and frames are added too.
    """
    video = store.length is not None
    dense: list[Image] = []
    for variant in variants:
        images = [frame for item in items for frame in store.frames(variant, item)]
        prompts = [items[0].prompt.text] * len(images) if video else [item.prompt.text for item in items]
        dense = dense or images
        for metric in metrics.of_pictures:
            if images is not dense or not metric.beside_dense:
                values = metric.measure(images, dense, prompts)
                columns[variant.label, metric.name].append(_mean_of_frames(values) if video else values)
        if video and images is not dense:
            pixels, dense_pixels = as_tensor(images), as_tensor(dense)
            for name, measure_motion in MOTION.items():
                columns[variant.label, name].append(measure_motion(pixels, dense_pixels).unsqueeze(0))
        for network in dict.fromkeys(metrics.of_sets.values()):
            features[variant.label][network].append(network(images))


def _mean_of_frames(values: Tensor) -> Tensor:
    """Average ``[f]`` to ``[1]``, without the infinite PSNR of frames that equal dense, unless all do."""
    finite = values[~values.isposinf()]
    return (finite if len(finite) else values).mean(dim=0, keepdim=True)


def distances_of(
    variant: str, measured: Measured, metrics: Metrics, reference: Features | None
) -> dict[str, float]:
    """Return the distances of a variant's pictures from the reference pictures; None: from the dense ones."""
    if reference is None:
        if variant == DENSE:
            return {}
        reference = measured.features.get(DENSE, {})
    own = measured.features.get(variant, {})
    return {name: DISTANCES[name](own[net], reference[net]) for name, net in metrics.of_sets.items()}


def figures_of(
    variant: str,
    measured: Measured,
    metrics: Metrics,
    chosen: Sequence[int],
    distances: Mapping[str, float] | None = None,
) -> Figures:
    """Average the measurements of one variant over the chosen pictures, given by their indices.

    The distances between sets are added as they are.
    """
    rows = torch.tensor(chosen)
    values: dict[str, float] = {}
    errors: dict[str, float] = {}
    equal = 0
    for name in [*(metric.name for metric in metrics.of_pictures), *MOTION]:
        if (column := measured.columns.get((variant, name))) is not None:
            found = column[rows].double()
            if name == "psnr":
                equal = int(found.isposinf().sum())
                found = found[~found.isposinf()]
            if len(found):
                values[name] = float(found.mean())
            if len(found) > 1:
                errors[name] = standard_error(found)
    values |= distances or {}
    undefined = tuple(name for name, value in values.items() if not math.isfinite(value))
    finite = {name: value for name, value in values.items() if name not in undefined}
    known = {name: error for name, error in errors.items() if name in finite and math.isfinite(error)}
    return Figures(finite, equal, len(chosen), undefined, known)


def standard_error(values: Tensor) -> float:
    """Return the standard error of the mean of two numbers or more, [n]."""
    return float(values.std() / len(values) ** 0.5)


def not_told_apart(
    measured: Measured, metric: str, labels: Sequence[str], lower: bool
) -> dict[str, list[str]]:
    """Return the best variant in a metric, and those whose paired difference from it is within the noise.

    The noise is two standard errors of the mean difference over the pictures that both have. The result is
    empty unless there are two variants with two pictures each.
    """
    found = {label: measured.columns.get((label, metric), torch.empty(0)).double() for label in labels}
    sign = -1.0 if lower else 1.0
    means = {label: sign * float(_finite(c).mean()) for label, c in found.items() if len(_finite(c)) > 1}
    if len(means) < 2:
        return {}
    best = max(means, key=means.__getitem__)
    differences = {label: _finite(found[best] - found[label]) for label in means if label != best}
    differs = {label for label, d in differences.items() if sign * float(d.mean()) > 2 * standard_error(d)}
    return {best: [label for label in differences if label not in differs]}


def _finite(values: Tensor) -> Tensor:
    return values[values.isfinite()]


def speedups_of(variant: str, measured: Measured, chosen: Sequence[int]) -> list[float]:
    """Return the speed-up t_dense / t of each chosen picture, sorted, without those of unknown time."""
    dense, own = (measured.columns[name, SECONDS][torch.tensor(chosen)] for name in (DENSE, variant))
    found = dense / own
    return sorted(found[found.isfinite()].tolist())
