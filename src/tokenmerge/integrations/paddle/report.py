"""Counts the tokens and operations of ppdiffusers' blocks at one size, dense and merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from tokenmerge.config import MergeSettings, ToMeConfig
from tokenmerge.config.checks import check_counts
from tokenmerge.integrations.paddle.models import PaddleBlock, PaddleModel, find_hosts
from tokenmerge.integrations.paddle.runtime import blocks_to_merge, deepest_level, merged_layers
from tokenmerge.integrations.portable import num_removed
from tokenmerge.text_table import Row, TextTable, given_or_default

_TEXT_TOKENS = 77


@dataclasses.dataclass(frozen=True)
class PaddleReport:
    """The blocks that merge in one call, with fields as in :class:`tokenmerge.report.Report`.

    The FLOPs of its rows are those of the sub-layers in ``merged``, and not of the whole block.
    """

    height: int
    width: int
    batch: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        """Return a table in plain text."""
        lines = [("block", "level", "grid", "tokens", "merged", "GFLOPs of what merges")]
        for row in self.rows:
            tokens = f"{row.tokens} → {row.merged_tokens}"
            flops = f"{row.flops_dense / 1e9:.2f} → {row.flops_merged / 1e9:.2f}"
            grid = f"{row.grid[0]} × {row.grid[1]}"
            lines.append((f"{row.model}: {row.path}", str(row.level), grid, tokens, row.layers, flops))
        title = f"sample {self.height} × {self.width}, batch {self.batch}"
        return str(TextTable(title, lines, self.notes))


def predict(
    pipe_or_layer: Any,
    config: ToMeConfig,
    height: int | None = None,
    width: int | None = None,
    batch: int = 2,
) -> PaddleReport:
    """Count what merging does, without running the model. The model may be patched.

    The size is that of the sample, which is that of the latents for latent diffusion. Without one, it is the
    model's default size.

    Raises:
        UnsupportedModelError: the object neither is nor contains a supported model.
        ConfigError: no size is given and the model has no default size, or a number is out of range.
    """
    check_counts(height=height, width=width, batch=batch)
    hosts = find_hosts(pipe_or_layer)
    height, width = given_or_default(hosts, height, width)
    rows: list[Row] = []
    for host in hosts:
        rows += _rows(host, config, height, width, batch)
    notes: list[str] = []
    for host in hosts:
        notes += _notes(host, config, rows)
    return PaddleReport(height, width, batch, tuple(rows), tuple(notes))


def _rows(host: PaddleModel, config: ToMeConfig, height: int, width: int, batch: int) -> Iterator[Row]:
    for block in blocks_to_merge(host, config):
        settings = config.at_level(block.level)
        grid = block.grid(height, width)
        n = grid[0] * grid[1]
        r = num_removed(grid, settings)
        keys_alone = settings.scope == "keys"
        names = merged_layers(block, settings)
        if not r:
            continue
        dense = sum(_flops(block, name, n, n) for name in names)
        merged = sum(_flops(block, name, n if keys_alone else n - r, n - r) for name in names)
        yield Row(
            model=host.name,
            path=block.path,
            level=block.level,
            grid=grid,
            tokens=n,
            merged_tokens=n - r,
            merged="+".join(names) if not keys_alone else f"keys of {names[0]}",
            flops_dense=batch * dense,
            flops_merged=batch * (merged + _matching_flops(block, grid, settings)),
        )


def _flops(block: PaddleBlock, name: str, queries: int, keys: int) -> int:
    """Count the operations of a sub-layer for one image."""
    layer = getattr(block.layer, name)
    if name == "ff":
        weights = [p for key, p in layer.named_parameters() if key.endswith("weight") and p.ndim == 2]
        return 2 * queries * sum(p.shape[0] * p.shape[1] for p in weights)
    keys = keys if name == "attn1" and block.own_keys else _TEXT_TOKENS
    ends = [(layer.to_q, queries), (layer.to_k, keys), (layer.to_v, keys), (layer.to_out[0], queries)]
    projections = sum(linear.weight.shape[0] * linear.weight.shape[1] * tokens for linear, tokens in ends)
    return 2 * projections + 4 * queries * keys * int(layer.inner_dim)


def _matching_flops(block: PaddleBlock, grid: tuple[int, int], settings: MergeSettings) -> int:
    """Count the operations of comparing sources with destinations, for one image."""
    cells = (grid[0] // settings.sy) * (grid[1] // settings.sx)
    compared = cells if settings.planner == "tome" else 0
    return 2 * (grid[0] * grid[1] - cells) * compared * int(block.layer.attn1.to_q.weight.shape[0])


def _notes(host: PaddleModel, config: ToMeConfig, rows: Sequence[Row]) -> Iterator[str]:
    merging = {row.path for row in rows if row.model == host.name}
    for level in sorted({block.level for block in host.blocks}):
        dense = [b for b in host.blocks if b.level == level and b.path not in merging]
        if not dense:
            continue
        if level > deepest_level(host, config):
            why = f"max_downsample={config.max_downsample}"
        elif not config.at_level(level).ratio:
            why = "ratio=0"
        elif any(not merged_layers(block, config.at_level(level)) for block in dense):
            why = "they have no layer that these settings merge"
        else:
            why = "their token grid is too small for these settings"
        yield f"{host.name}: {len(dense)} blocks stay dense at level {level}: {why}"
    if any(block.layer._chunk_size for block in host.blocks):
        yield f"{host.name}: feed-forward layers that run in chunks stay dense"
