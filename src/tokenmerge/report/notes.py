"""Says in words which blocks stay dense, and what differs between levels and steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tokenmerge.config import Rule, StepReuse, ToMeConfig
from tokenmerge.models.base import KINDS, Block
from tokenmerge.plans.generation import GenerationPlan, Merging, StepKind, StepPlan
from tokenmerge.runtime.patching.patch import deepest_level, layers_to_merge, merges
from tokenmerge.text_table import Row

# The sign of each kind of step, and what it does.
SIGNS = {
    "M": "the whole model runs, and tokens merge",
    "D": "the whole model runs, and no token merges",
    "C": "the whole model runs, and no token merges; this step corrects what merging loses in the others",
    "s": "only the first and last stage of the UNet run; the rest is extrapolated",
    "·": "no block runs, and what the blocks would add is extrapolated",
}
# What a shallow step does where every full step merges tokens: then it merges them too.
_SHALLOW_MERGES = "only the first and last stage of the UNet run, and tokens merge; the rest is extrapolated"
KIND_OF_SIGN = {
    "M": StepKind.FULL,
    "D": StepKind.FULL,
    "C": StepKind.FULL,
    "s": StepKind.SHALLOW,
    "·": StepKind.SKIPPED,
}
_SIGN_OF_FULL = {Merging.MERGES: "M", Merging.MEASURES: "C", Merging.DENSE: "D"}


def signs_of(plan: GenerationPlan, merges: bool, is_unet: bool) -> str:
    """Draw a generation plan as one sign for each step.

    ``merges``: whether any block merges at this size; ``is_unet``: whether a finest level can run alone.
    """
    return "".join(_sign_of(step, merges, is_unet) for step in plan)


def _sign_of(step: StepPlan, merges: bool, is_unet: bool) -> str:
    kind = step.kind.in_model(is_unet)
    if kind is StepKind.SHALLOW:
        return "s"
    if kind is StepKind.SKIPPED:
        return "·"
    if step.merging is Merging.MERGES and not merges:
        return _SIGN_OF_FULL[Merging.DENSE]
    return _SIGN_OF_FULL[step.merging]


def legend(plan: str) -> list[str]:
    """Return a line for each sign of a plan: the number of steps with it, their kind, and what they do."""
    lines = []
    for sign, what in SIGNS.items():
        count = plan.count(sign)
        if count == 0:
            continue
        if sign == "s" and "M" in plan and "D" not in plan:
            what = _SHALLOW_MERGES
        steps = "step" if count == 1 else "steps"
        lines.append(f"{sign} in {count} {KIND_OF_SIGN[sign].value} {steps}: {what}")
    return lines


def merged_parts(block: Block, config: ToMeConfig) -> str:
    """Name the parts of a block that run on merged tokens."""
    scope = config.at_level(block.level).scope
    if scope == "block":
        return "whole block"
    names = "+".join(layer.name for layer in layers_to_merge(block, config))
    return f"keys of {names}" if scope == "keys" else names


def paths_that_merge(block: Block, config: ToMeConfig) -> list[str]:
    """Return the paths of the modules that run on merged tokens: a block, or some of its layers."""
    if config.at_level(block.level).scope == "block":
        return [block.path]
    return [f"{block.path}.{layer.name}" for layer in layers_to_merge(block, config)]


def notes_on_blocks(blocks: Sequence[Block], rows: Sequence[Row], config: ToMeConfig) -> list[str]:
    """Say which blocks stay dense and why, and where merging costs more than it saves."""
    if not config.merges:
        return ["no token merges"]
    kinds = config.merged_layers if config.scope == "layers" else ()
    deepest = deepest_level(blocks, config)
    too_deep = Counter(block.level for block in blocks if block.level > deepest)
    within = [block for block in blocks if block.level <= deepest]
    able = [block for block in within if merges(block, config)]
    too_small = [block.path for block in able if all(block.path != row.path for row in rows)]
    notes = [
        f"{_not_merging(count)} at level {level}: max_downsample={config.max_downsample}"
        for level, count in sorted(too_deep.items())
    ]
    # A block that says by itself why a kind of layer stays dense has a note of its own below.
    without = [block for block in within if block not in able and block.dense.keys().isdisjoint(kinds)]
    if without:
        they = "it" if len(without) == 1 else "they"
        they_have = "it has" if len(without) == 1 else "they have"
        why = {
            "layers": f"{they_have} no {' or '.join(KINDS[kind] for kind in kinds)}",
            "block": f"{they} cannot run on merged tokens as a whole",
            "keys": f"{they_have} no self-attention that takes keys separately from queries",
        }
        notes.append(f"{_not_merging(len(without))}: {why[config.scope]}")
    if rows and rows[0].references and config.reference_ratio is not None:
        notes.append(
            f"ratio={config.ratio:g} for the image being made, reference_ratio={config.reference_ratio:g} "
            "for its reference images"
        )
    if too_small and config.min_tokens:
        notes.append(f"{_not_merging(len(too_small))}: fewer than {config.min_tokens} tokens (min_tokens)")
    else:
        notes += [
            f"{path} stays dense: its token grid has no cell of sy={config.sy} × sx={config.sx}, "
            f"or ratio={config.ratio:g} removes no token of it"
            for path in too_small
        ]
    notes += dict.fromkeys(block.dense[kind] for block in blocks for kind in kinds if kind in block.dense)
    notes += [
        f"{row.path}: merging costs more operations than it saves; lower max_downsample or raise ratio"
        for row in rows
        if row.flops_merged >= row.flops_dense
    ]
    return notes


def _not_merging(count: int) -> str:
    return "1 block does not merge" if count == 1 else f"{count} blocks do not merge"


def notes_on_steps(config: ToMeConfig, steps: int | None = None) -> list[str]:
    """Describe what differs between levels and between steps.

    ``steps`` is the number of steps, or None if it is unknown. If it is known, the plan shows which steps run
    what, so no note repeats it.
    """
    # A plan shows in which steps no token merges.
    shown = [rule for rule in config.rules if not steps or rule.level or rule.changes != {"ratio": 0.0}]
    of_ratio = [rule for rule in shown if _changes_the_ratio(rule)]
    if len(of_ratio) > 1 and of_ratio[0].start == 0:
        ratios = (f"{rule.changes['ratio']:g} from {100 * rule.start:.3g} %" for rule in of_ratio)
        notes = [f"the ratio changes over the steps: {', '.join(ratios)} on"]
        shown = [rule for rule in shown if rule not in of_ratio]
    else:
        notes = []
    notes += [f"{_where(rule)}: {_what(rule)}" for rule in shown]
    if config.correction.on and not steps:
        every = config.correction.every
        notes.append(
            f"correction.every={every}: 1 of {every} full steps merges nothing; the others add back the "
            "detail that merging would have lost there"
        )
    if config.reuse.on and not steps:
        notes += _notes_on_reuse(config.reuse)
    if config.merge_sharing.every > 1:
        notes.append(f"a plan is used for {config.merge_sharing.every} steps")
    if config.merge_sharing.blocks:
        notes.append("neighbouring blocks merge the same tokens; the first one finds them, and saves less")
    if config.cached_features:
        what = "all blocks of a level" if config.cached_features == "model_residual" else "each block"
        notes.append(
            f"plans compare what {what} added at the step before (features={config.cached_features!r}); the "
            "first step compares the inputs of blocks"
        )
    if config.guided_planner:
        notes.append(
            f"planner={config.guided_planner!r}: the planner 'tome' runs until the first guided step is done"
        )
    differ = any(rule.of_steps for rule in config.rules)
    differ |= not steps and (config.correction.on or config.reuse.on)
    if differ and (config.merges or not steps):
        which = "the step that merges most" if config.merges else "a full step"
        more = "; pass a number of steps (--steps) to count the mean operations too"
        notes.append(f"blocks are counted in {which}{'' if steps else more}")
    return notes


def _changes_the_ratio(rule: Rule) -> bool:
    """Return whether a rule changes the ratio in some steps, the cells that suit it, and nothing else."""
    return (
        rule.of_steps
        and rule.level is None
        and "ratio" in rule.changes
        and rule.changes.keys() <= {"ratio", "sx"}
    )


def _notes_on_reuse(reuse: StepReuse) -> list[str]:
    skipped = (
        "the others skip the levels of a UNet below its finest, or the blocks of other models, and "
        "extrapolate their outputs linearly"
    )
    if reuse.full_steps:
        places = ", ".join(f"{100 * place:.0f} %" for place in reuse.full_steps)
        return [f"reuse.full_steps: steps at {places} of the way are full; {skipped}"]
    notes = [f"{reuse.given}: 1 of {reuse.every:g} steps is full; {skipped}"]
    if reuse.shallow_every > 1:
        notes.append(
            f"reuse.shallow_every={reuse.shallow_every:g}: 1 of {reuse.shallow_every:g} steps runs the "
            "finest level of a UNet, the others skip it too"
        )
    return notes


def _where(rule: Rule) -> str:
    where = [] if rule.level is None else [f"level {rule.level}"]
    start, until = (f"{100 * share:.3g} %" for share in (rule.start, rule.until))
    if rule.start > 0:
        end = "of the steps on" if rule.until == 1 else f"to {until} of the steps"
        where.append(f"from {start} {end}")
    elif rule.until < 1:
        where.append(f"in the first {until} of the steps")
    return ", ".join(where)


def _what(rule: Rule) -> str:
    if rule.level is None and rule.changes.get("ratio") == 0 and "reuse.every" in rule.changes:
        return "nothing merges, and nothing is skipped"
    return ", ".join(f"{name}={value}" for name, value in rule.changes.items())
