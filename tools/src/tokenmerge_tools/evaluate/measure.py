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

    ``columns`` has, by (variant, name of the metric), its values [n], and by (variant, ``SECONDS``) the
    seconds that each one took, NaN if unknown. ``configs`` has, by variant, the settings that pictures were
    drawn with, as JSON, and ``features`` those of all its pictures and frames.
    """

    columns: Mapping[tuple[str, str], Tensor]
    configs: Mapping[str, frozenset[str]]
    features: Mapping[str, Features] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Figures:
    """Means over pictures, without the infinite PSNR of those that ``equal`` dense in every pixel.

    Metrics whose mean is not finite are named in ``undefined`` and left out of ``values``.
    """

    values: Mapping[str, float]
    equal: int
    images: int
    undefined: tuple[str, ...] = ()


def measure(
    batches: Sequence[Sequence[Item]], variants: Sequence[Variant], store: PictureStore, metrics: Metrics
) -> Measured:
    """Measure what was drawn before, in batches. Dense comes first."""
    columns: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    configs: dict[str, set[str]] = defaultdict(set)
    features: dict[str, dict[Network, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    for items in batches:
        for group in [items] if store.length is None else ([item] for item in items):
            _add_rows(group, variants, store, metrics, columns, features)
        for variant in variants:
            seconds = [store.seconds(variant, item) for item in items]
            columns[variant.label, SECONDS].append(torch.tensor(seconds, dtype=torch.float64))
            configs[variant.label] |= {found for item in items if (found := store.config(variant, item))}
    return Measured(
        {name: torch.cat(parts) for name, parts in columns.items()},
        {label: frozenset(found) for label, found in configs.items()},
        {label: {n: torch.cat(parts) for n, parts in found.items()} for label, found in features.items()},
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
    equal = 0
    for name in [*(metric.name for metric in metrics.of_pictures), *MOTION]:
        if (column := measured.columns.get((variant, name))) is not None:
            found = column[rows].double()
            if name == "psnr":
                equal = int(found.isposinf().sum())
                found = found[~found.isposinf()]
            if len(found):
                values[name] = float(found.mean())
    values |= distances or {}
    undefined = tuple(name for name, value in values.items() if not math.isfinite(value))
    finite = {name: value for name, value in values.items() if name not in undefined}
    return Figures(finite, equal, len(chosen), undefined)


def speedups_of(variant: str, measured: Measured, chosen: Sequence[int]) -> list[float]:
    """Return the speed-up t_dense / t of each chosen picture, sorted, without those of unknown time."""
    dense, own = (measured.columns[name, SECONDS][torch.tensor(chosen)] for name in (DENSE, variant))
    found = dense / own
    return sorted(found[found.isfinite()].tolist())
