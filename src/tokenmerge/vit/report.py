"""Counts what merging does to each layer of a vision transformer at one image size."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

from tokenmerge.config.checks import check_counts
from tokenmerge.errors import ConfigError
from tokenmerge.report.flops import count_flops, weightless
from tokenmerge.report.prediction import gflops
from tokenmerge.text_table import Tabled, TextTable
from tokenmerge.vit.config import ViTConfig
from tokenmerge.vit.planner import RecordedTokens
from tokenmerge.vit.runtime import EncoderState, checked_encoders, patch_encoder


@dataclasses.dataclass(frozen=True)
class ViTRow:
    """One layer: ``tokens`` are in its attention, ``merged_tokens`` in its MLP and its result.

    ``flops_merged`` includes the matching.
    """

    path: str
    tokens: int
    merged_tokens: int
    flops_dense: int
    flops_merged: int


@dataclasses.dataclass(frozen=True, repr=False)
class ViTReport(Tabled):
    """The operations of one call of a vision transformer, dense and merged. Sizes are in pixels.

    FLOPs count matrix products, convolutions and attention of the whole model, with two for a multiply-add.
    The time saved also depends on the machine. ``notes`` name the layers that remove fewer tokens than asked.
    """

    model: str
    height: int
    width: int
    batch: int
    rows: tuple[ViTRow, ...]
    flops_dense: int
    flops_merged: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for records."""
        return dataclasses.asdict(self)

    def _table(self) -> TextTable:
        lines = [("layer", "tokens", "GFLOPs", "saved")]
        lines += [
            (row.path, f"{row.tokens} → {row.merged_tokens}", *gflops(row.flops_dense, row.flops_merged))
            for row in self.rows
        ]
        lines.append(("whole model", "", *gflops(self.flops_dense, self.flops_merged)))
        title = f"{self.model}: {self.height} × {self.width} pixels, batch {self.batch}"
        return TextTable(title, lines, self.notes)


def predict_vit(
    model: object, config: ViTConfig, height: int | None = None, width: int | None = None, batch: int = 1
) -> ViTReport:
    """Count what merging saves, with a copy of the model without weights on the meta device.

    The model itself is neither called nor changed. It may already be patched or on the meta device.

    Args:
        model: what :func:`tokenmerge.apply_token_merging` takes. Only its first encoder is counted.
        config: the settings.
        height: height of the images, in pixels, or None for the height that the model was made for.
        width: width of the images, in pixels, or None for the width that the model was made for.
        batch: number of images in the call.

    Raises:
        UnsupportedModelError, NothingToMergeError: as :func:`tokenmerge.apply_token_merging`.
        ConfigError: the size is not valid, or ``config.r`` is a sequence of the wrong length.
    """
    check_counts(height=height, width=width, batch=batch)
    original, encoder = next(iter(checked_encoders(model, config).items()))
    root = weightless(original)
    usual_height, usual_width = encoder.image_size
    height = height or usual_height
    width = width or usual_width
    arguments = encoder.example(root, height, width, batch)
    name = type(root).__name__
    seen: list[int] = []
    first = root.get_submodule(encoder.layers[0].path)
    first.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    try:
        dense = count_flops(root, arguments)
    except Exception as error:
        raise ConfigError(
            f"height, width: {name} takes no images of {height} × {width} pixels: {error}; give another "
            "size: patch.report(height=…, width=…)"
        ) from error

    state = EncoderState(config, encoder)
    state.unmerge = False
    patch_encoder(root, state)
    recorded: dict[str, RecordedTokens] = {}
    state.record = recorded
    merged = count_flops(root, arguments)

    tokens = [seen[0]]
    for layer in encoder.layers:
        tokens.append(recorded[layer.path].sizes.shape[1] if layer.path in recorded else tokens[-1])
    rows = tuple(
        ViTRow(layer.path, n, m, dense[f"{name}.{layer.path}"], merged[f"{name}.{layer.path}"])
        for layer, (n, m) in zip(encoder.layers, pairwise(tokens), strict=True)
    )
    notes = _notes(rows, state.r, config.unmerge, encoder.averages)
    return ViTReport(name, height, width, batch, rows, dense[name], merged[name], notes)


def _notes(rows: tuple[ViTRow, ...], r: tuple[int, ...], unmerges: bool, averages: bool) -> tuple[str, ...]:
    if not any(r):
        return ("r=0: every layer stays dense, as asked",)
    notes = [
        f"{row.path} removes {row.tokens - row.merged_tokens} tokens instead of {wanted}: at most half "
        "of those that may merge"
        for row, wanted in zip(rows, r, strict=True)
        if row.tokens - row.merged_tokens < wanted
    ]
    if unmerges or averages:
        why = "as asked" if unmerges else "because the head pools the patches"
        notes.append(f"{rows[-1].path} gives each input token a result, {why}")
    return tuple(notes)
