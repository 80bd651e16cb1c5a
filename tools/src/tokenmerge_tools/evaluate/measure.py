"""Measures the pictures of one process, and averages over the pictures of all processes."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokenmerge_tools.evaluate.drawn import Drawn
from tokenmerge_tools.evaluate.metrics import MOTION, Metrics
from tokenmerge_tools.evaluate.picture_store import PictureStore
from tokenmerge_tools.evaluate.prompts import Item
from tokenmerge_tools.files import open_picture
from tokenmerge_tools.sheets import as_tensor
from tokenmerge_tools.variants.variant import DENSE

if TYPE_CHECKING:
    from PIL.Image import Image


SECONDS = "seconds"


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of n pictures or videos, given by their indices [n].

    ``columns`` has, by (variant, name of the metric), its values [n]; by (variant, name of the network),
    features [n, d], or [n, f, d] for videos of f frames; by (variant, ``SECONDS``), the seconds that each one
    took, NaN if unknown. ``configs`` has, by variant, the settings that pictures were drawn with, as JSON.
    """

    indices: Tensor
    columns: Mapping[tuple[str, str], Tensor]
    configs: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)

    @classmethod
    def merge(cls, parts: Sequence[Measured]) -> Measured:
        """Join the measurements of several processes, in the order of the pictures' indices."""
        filled = [part for part in parts if len(part.indices)]
        indices = torch.cat([part.indices for part in filled])
        order = indices.argsort()
        names = filled[0].columns
        columns = {name: torch.cat([part.columns[name] for part in filled])[order] for name in names}
        labels = dict.fromkeys(label for part in filled for label in part.configs)
        configs = {
            label: frozenset[str]().union(*(part.configs.get(label, ()) for part in filled))
            for label in labels
        }
        return cls(indices[order], columns, configs)


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
    batches: Sequence[Sequence[tuple[int, Item]]],
    variants: Sequence[Drawn],
    store: PictureStore,
    metrics: Metrics,
) -> Measured:
    """Measure what was drawn before, in batches of indices and items. Dense comes first."""
    columns: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    configs: dict[str, set[str]] = defaultdict(set)
    for batch in batches:
        items = [item for _, item in batch]
        for group in [items] if store.length is None else ([item] for item in items):
            _add_rows(group, variants, store, metrics, columns)
        for variant in variants:
            seconds = [store.seconds(variant, item) for item in items]
            columns[variant.label, SECONDS].append(torch.tensor(seconds, dtype=torch.float64))
            configs[variant.label] |= {found for item in items if (found := store.config(variant, item))}
    return Measured(
        torch.tensor([index for batch in batches for index, _ in batch]),
        {name: torch.cat(parts) for name, parts in columns.items()},
        {label: frozenset(found) for label, found in configs.items()},
    )


def _add_rows(
    items: Sequence[Item],
    variants: Sequence[Drawn],
    store: PictureStore,
    metrics: Metrics,
    columns: dict[tuple[str, str], list[Tensor]],
) -> None:
    """Add a row for each picture, or one for a video: means over frames, motion, features of all frames."""
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
        for name, network in metrics.features.items():
            columns[variant.label, name].append(network(images)[None] if video else network(images))


def _mean_of_frames(values: Tensor) -> Tensor:
    """Average ``[f]`` to ``[1]``, without the infinite PSNR of frames that equal dense, unless all do."""
    finite = values[~values.isposinf()]
    return (finite if len(finite) else values).mean(dim=0, keepdim=True)


def describe(batches: Sequence[Sequence[tuple[int, Path]]], metrics: Metrics) -> Measured:
    """Compute the features of reference pictures. Their columns have the variant ``""``."""
    columns: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    for batch in batches:
        images = [open_picture(path, "reference", "leave it out of the folder") for _, path in batch]
        for name, network in metrics.features.items():
            columns["", name].append(network(images))
    indices = torch.tensor([index for batch in batches for index, _ in batch])
    return Measured(indices, {name: torch.cat(parts) for name, parts in columns.items()})


def figures_of(
    variant: str,
    measured: Measured,
    metrics: Metrics,
    reference: Measured | None,
    chosen: Sequence[int] | None = None,
) -> Figures:
    """Average the measurements of one variant.

    ``chosen`` has the indices of the pictures of one category; None: all pictures. Distances between sets are
    only computed for all pictures. Without reference pictures, they compare with the dense ones.
    """
    rows = slice(None) if chosen is None else torch.tensor(chosen)
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
    for distance in metrics.of_sets if chosen is None else ():
        other = measured.columns[DENSE, distance.network]
        if reference is not None:
            other = reference.columns["", distance.network]
        elif variant == DENSE:
            continue
        own = measured.columns[variant, distance.network]
        # Every frame of a video counts as a picture.
        values[distance.name] = distance.distance(own.flatten(0, -2), other.flatten(0, -2))
    undefined = tuple(name for name, value in values.items() if not math.isfinite(value))
    finite = {name: value for name, value in values.items() if name not in undefined}
    return Figures(finite, equal, len(measured.indices) if chosen is None else len(chosen), undefined)


def speedups_of(variant: str, measured: Measured, chosen: Sequence[int] | None = None) -> list[float]:
    """Return the speed-up t_dense / t of each picture, sorted. Pictures of unknown time are left out.

    The arguments are as for :func:`figures_of`.
    """
    rows = slice(None) if chosen is None else torch.tensor(chosen)
    dense, own = (measured.columns[name, SECONDS][rows] for name in (DENSE, variant))
    found = dense / own
    return sorted(found[found.isfinite()].tolist())
