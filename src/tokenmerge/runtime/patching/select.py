"""Which blocks and layers of a model merge under a configuration, and why none does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tokenmerge.config import MergeSettings, ToMeConfig
from tokenmerge.models.base import KINDS, Block, Host, Layer
from tokenmerge.runtime.blocks.forward import takes_part


def phases_at(config: ToMeConfig, *levels: int) -> tuple[tuple[int, MergeSettings], ...]:
    """Return (level, what holds there) for each of some levels and each phase."""
    return tuple((level, phase.at_level(level)) for level in levels for phase in config.phases())


def parts_to_merge(host: Host, config: ToMeConfig) -> list[tuple[Block, list[Layer]]]:
    """Return the blocks in which something merges, each with the layers whose calls change."""
    deepest = deepest_level(host.blocks, config)
    within = [block for block in host.blocks if block.level <= deepest]
    return [(block, layers_to_merge(block, config)) for block in within if merges(block, config)]


def deepest_level(blocks: Iterable[Block], config: ToMeConfig) -> int:
    """Return the deepest level that merges: ``max_downsample``, or the finest level that can merge."""
    finest = min((block.level for block in blocks if merges(block, config)), default=1)
    return max(config.max_downsample, finest)


def merges(block: Block, config: ToMeConfig) -> bool:
    """Return whether something of a block can merge, in some phase."""
    return any(
        block.block_layout is not None
        if own.scope == "block"
        else any(takes_part(layer, own) for layer in block.layers)
        for _, own in phases_at(config, block.level)
    )


def layers_to_merge(block: Block, config: ToMeConfig) -> list[Layer]:
    """Return the sub-layers whose calls change, in some phase."""
    phases = phases_at(config, block.level)
    return [layer for layer in block.layers if any(takes_part(layer, own) for _, own in phases)]


def skipped_parts(host: Host, config: ToMeConfig) -> Iterator[tuple[str, bool, bool]]:
    """Yield the stages that some steps skip: path, whether at the finest level, whether last there."""
    if config.reuse.on:
        yield from ((path, False, path == host.deep_stages[-1]) for path in host.deep_stages)
    if config.reuse.skips_finest:
        yield from ((path, True, path == host.shallow_stages[-1]) for path in host.shallow_stages)


def why_nothing_merges(host: Host, config: ToMeConfig) -> str:
    """Return the message of the error for a host in which no block would merge, with what to set instead."""
    name = type(host.root).__name__
    if not host.blocks:
        return (
            f"nothing to merge: {name} has no transformer block; token merging needs a model with attention"
        )
    if config.scope != "layers":
        what = {"block": "run on merged tokens as a whole", "keys": "be given its keys apart"}
        return (
            f"nothing to merge: no transformer block of {name} can {what[config.scope]}, as "
            f"scope={config.scope!r} needs; take scope='layers'"
        )
    wanted = " or ".join(KINDS[kind] for kind in config.merged_layers)
    reasons = dict.fromkeys(
        b.dense[kind] for b in host.blocks for kind in config.merged_layers if kind in b.dense
    )
    return (
        f"nothing to merge: no transformer block of {name} has {wanted} that can merge; set merge_attn, "
        f"merge_crossattn or merge_mlp{''.join(f' ({reason})' for reason in reasons)}"
    )
