"""Which blocks and layers of a model merge under a configuration, and why none does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenmerge.config import MergeSettings, ToMeConfig
from tokenmerge.models.base import KINDS, Block, Host, Layer


def parts_to_merge(host: Host, config: ToMeConfig) -> list[tuple[Block, list[Layer]]]:
    """Return the blocks in which something merges, each with the layers whose calls change."""
    within = [block for block in host.blocks if block.level <= config.max_downsample]
    stages = {level: _stages(config, level) for level in {block.level for block in within}}
    return [
        (block, _changed_layers(block, stages[block.level]))
        for block in within
        if _merges(block, stages[block.level])
    ]


def _stages(config: ToMeConfig, level: int) -> tuple[MergeSettings, ...]:
    return tuple(stage.at_level(level) for stage in config.stages())


def merges(block: Block, config: ToMeConfig) -> bool:
    """Return whether something of a block can merge, in some phase."""
    return _merges(block, _stages(config, block.level))


def _merges(block: Block, stages: Sequence[MergeSettings]) -> bool:
    return any(
        block.block_layout is not None if stage.scope == "block" else bool(_layers(block, stage))
        for stage in stages
    )


def layers_to_merge(block: Block, config: ToMeConfig) -> list[Layer]:
    """Return the sub-layers whose calls change, in some phase."""
    return _changed_layers(block, _stages(config, block.level))


def _changed_layers(block: Block, stages: Sequence[MergeSettings]) -> list[Layer]:
    wanted = {layer.name for stage in stages for layer in _layers(block, stage)}
    return [layer for layer in block.layers if layer.name in wanted]


def _layers(block: Block, stage: MergeSettings) -> list[Layer]:
    if stage.scope == "keys":
        return [layer for layer in block.layers if layer.keys is not None]
    if stage.scope == "block":  # its attention counts merged tokens for as many as they stand for
        attention = [layer for layer in block.layers if layer.kind == "attn1" and layer.own_keys]
        return attention if stage.proportional else []
    return [layer for layer in block.layers if layer.kind in stage.merged_layers]


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
    blocks = [block for block in host.blocks if merges(block, config)]
    if not blocks and config.scope != "layers":
        what = {
            "block": "run on merged tokens as a whole",
            "keys": "be given its keys apart",
        }
        return (
            f"nothing to merge: no transformer block of {name} can {what[config.scope]}, as "
            f"scope={config.scope!r} needs; take scope='layers'"
        )
    wanted = " or ".join(KINDS[kind] for kind in config.merged_layers)
    if not blocks:
        reasons = dict.fromkeys(
            b.dense[kind] for b in host.blocks for kind in config.merged_layers if kind in b.dense
        )
        return (
            f"nothing to merge: no transformer block of {name} has {wanted} that can merge; set merge_attn, "
            f"merge_crossattn or merge_mlp{''.join(f' ({reason})' for reason in reasons)}"
        )
    levels = sorted({block.level for block in blocks})
    return (
        f"nothing to merge: the {len(blocks)} transformer blocks of {name} with {wanted} are at the levels "
        f"{', '.join(map(str, levels))}, and max_downsample={config.max_downsample} merges none of them; "
        f"set max_downsample to {levels[0]} or more"
    )
