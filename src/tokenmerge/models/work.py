"""How the work of a dense call is shared between steps, and between parts that merge and others."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

from tokenmerge.models.base import Block, Host

# "always" runs in every step. Step reuse skips the others: "finest" and "deep" are the finest level of a UNet
# and what lies below, "blocks" the blocks of other models.
Part = Literal["always", "finest", "deep", "blocks"]
Scopes = frozenset[str]  # the scopes of token merging that merge something: "layers", "block"

# Parts of names of modules that work once for each sample, and on the text. The first match counts.
_ONCE = ("norm", "mod", "adaln", "time", "temb", "add_embedding", "pooled", "guidance", "class_emb", "label")
# The text's own layers of HiDream end with "_t". Sound has about as few tokens as the text.
_ON_TEXT = ("context", "caption", "text", "txt", "add_", "encoder_hid", "_t.", "audio_attn", "audio_ff")
_TEXT_ARGUMENTS = ("encoder_hidden_states", "context")


@dataclasses.dataclass(frozen=True)
class Amount:
    """Multiplications for one sample: a polynomial in the number of tokens."""

    fixed: float = 0.0  # such as those on the text
    per_token: float = 0.0  # such as those with weights
    per_pair: float = 0.0  # of tokens, in attention

    def at(self, tokens: float) -> float:
        """Return the multiplications for this number of tokens.

        >>> Amount(fixed=1, per_token=10, per_pair=2).at(3)
        49.0
        """
        return float(self.fixed + (self.per_token + self.per_pair * tokens) * tokens)

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.fixed + other.fixed, self.per_token + other.per_token, self.per_pair + other.per_pair
        )


@dataclasses.dataclass(frozen=True)
class Share:
    """The work that runs in the same steps, at one resolution level, and merges under the same settings."""

    part: Part
    level: int  # as a divisor of the finest token grid: 1, 2, 4 …
    scopes: Scopes
    amount: Amount  # in tokens of its level


@dataclasses.dataclass(frozen=True)
class PlanningWork:
    """A merge plan that blocks can share."""

    parts: frozenset[Part]  # those with blocks that use it
    level: int
    channels: int  # of the tokens that are compared
    scopes: Scopes  # those that need it
    blocks: int  # number of blocks that can share it


@dataclasses.dataclass(frozen=True)
class Work:
    """How the work of a dense call is shared, at any size of the image."""

    shares: tuple[Share, ...]
    plans: tuple[PlanningWork, ...] = ()

    @property
    def parts(self) -> frozenset[Part]:
        """The parts of the model in which anything runs."""
        return frozenset(share.part for share in self.shares)

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels that have anything to merge, the finest first."""
        return tuple(sorted({plan.level for plan in self.plans}))


def work_of(host: Host, text: int | None = None) -> Work:
    """Compute how the work of a call is shared, from the sizes of the weights. Nothing runs.

    ``text`` is the number of text tokens of a call, or None for as many as the family's example has.
    """
    if host.span:
        return _work_of_span(host)
    words = _words(host) if text is None else text
    found: dict[tuple[Part, int, Scopes], Amount] = defaultdict(Amount)
    within = {}  # by the path of a module, the block that it lies in, and its path there
    for owner in host.blocks:
        for inner, _ in owner.module.named_modules(remove_duplicate=False):
            within[f"{owner.path}.{inner}"] = (owner, inner)
    for path, module in host.root.named_modules(remove_duplicate=False):
        number = 0 if module._modules else _weights(module)
        if number == 0:
            continue
        block, inner = within.get(path, (None, path))
        level = block.level if block else _level_at(host, path)
        scopes = _scopes(block, inner.partition(".")[0] in _names(block, "attn1"))
        found[_part(host, path, block), level, scopes] += _of_weights(host, block, inner, number, words)
    for owner in host.blocks:
        for amount, scopes in _attention(host, owner, words):
            found[_part(host, owner.path, owner), owner.level, scopes] += amount
    return Work(tuple(Share(*place, amount) for place, amount in found.items()), tuple(_plans(host)))


def _work_of_span(host: Host) -> Work:
    """Compute how the work is shared between what is skipped and the rest, by the weights alone.

    How many tokens there are is unknown. Attention, which is not counted, would add to what is skipped.
    """
    paths = tuple(f"{path}." if path else "" for path in host.span)
    shares = {"always": 0, "blocks": 0}
    for path, module in host.root.named_modules(remove_duplicate=False):
        number = 0 if module._modules else _weights(module)
        shares["blocks" if f"{path}.".startswith(paths) else "always"] += number
    parts: tuple[Part, ...] = ("always", "blocks")
    return Work(tuple(Share(part, 1, Scopes(), Amount(fixed=shares[part])) for part in parts if shares[part]))


def _words(host: Host) -> int:
    if host.words is not None:
        return host.words
    arguments = host.example(*(host.sample_size or (16, 16)), 1)
    found = (arguments[name] for name in _TEXT_ARGUMENTS if getattr(arguments.get(name), "ndim", 0) >= 3)
    return next((value.shape[-2] for value in found), 0)


def _weights(module: Any) -> int:
    """Return the weights of a linear layer or convolution that multiply at one position, or 0 for others."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return module.in_channels // module.groups * math.prod(module.kernel_size) * module.out_channels
    # Quantised layers have packed weights, and these numbers too.
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 0  # type: ignore[arg-type]


def _stage_of(host: Host, path: str) -> str:
    """Return the path of a UNet's stage that a module lies in, or an empty string outside stages."""
    return next((stage for stage in host.stages if f"{path}.".startswith(f"{stage}.")), "")


def _level_at(host: Host, path: str) -> int:
    """Return the level at which a layer outside blocks works."""
    level = host.stages.get(_stage_of(host, path), 1)
    if "downsamplers" in path:
        return level * 2
    return level // 2 if "upsamplers" in path else level


def _part(host: Host, path: str, block: Block | None) -> Part:
    if not host.stages:
        return "blocks" if block is not None and block.skippable else "always"
    stage = _stage_of(host, path)
    if stage in host.deep_stages:
        return "deep"
    return "finest" if stage else "always"


def _names(block: Block | None, kind: str) -> tuple[str, ...]:
    return tuple(layer.name for layer in block.layers if layer.kind == kind) if block else ()


def _scopes(block: Block | None, attends: bool) -> Scopes:
    """Return the scopes of merging under which a part of a block gets merged tokens."""
    merged = {"layers": attends, "block": block is not None and block.block_layout is not None}
    return frozenset(scope for scope, merges in merged.items() if merges)


def _of_weights(host: Host, block: Block | None, inner: str, weights: int, words: int) -> Amount:
    number = weights * next((share for part, share in host.shares.items() if part in inner), 1.0)
    if any(name in inner for name in _ONCE):
        return Amount(fixed=number)
    if _is_on_text(block, inner):
        return Amount(fixed=number * words)
    joined = block is not None and _joins_text(host, block)
    return Amount(fixed=number * words if joined else 0, per_token=number)


def _is_on_text(block: Block | None, inner: str) -> bool:
    if any(name in f"{inner}." for name in _ON_TEXT):
        return True
    cross = [name for name in _names(block, "attn2") if inner.startswith(f"{name}.")]
    return any(inner.startswith((f"{name}.to_k", f"{name}.to_v")) for name in cross)


def _joins_text(host: Host, block: Block) -> bool:
    """Return whether all layers of a block get the text in one sequence with the image."""
    if host.stages or block.grid is not None:
        return False
    return not any(_is_on_text(block, path) for path, _ in block.module.named_modules())


def _attention(host: Host, block: Block, words: int) -> Iterator[tuple[Amount, Scopes]]:
    """Yield the work of comparing and summing tokens in each attention of a block."""
    for layer in block.layers:
        if layer.kind == "ff":
            continue
        module = getattr(block.module, layer.name)
        pair = 2 * _channels(module)
        if layer.kind == "attn2":
            amount = Amount(per_token=pair * words)
        else:
            has_text = any(_is_on_text(None, name) for name, _ in module.named_modules())
            joint = words if has_text or _joins_text(host, block) else 0
            amount = Amount(pair * joint**2, 2 * pair * joint, pair)
        yield amount, _scopes(block, layer.kind == "attn1")


def _channels(attention: Any) -> int:
    channels = getattr(getattr(attention, "to_q", None), "out_features", None)
    return channels if isinstance(channels, int) else int(getattr(attention, "inner_dim", 0))


def _plans(host: Host) -> Iterator[PlanningWork]:
    """Yield the plans of a call: one for all blocks that can share it."""
    found: dict[tuple[object, ...], list[Block]] = defaultdict(list)
    for block in host.blocks:
        found[block.plan_group].append(block)
    for blocks in found.values():
        scopes = Scopes().union(*(_scopes(block, bool(_names(block, "attn1"))) for block in blocks))
        parts = frozenset(_part(host, block.path, block) for block in blocks)
        layers = []
        for block in blocks:
            layers += [getattr(block.module, layer.name) for layer in block.layers]
        channels = _channels(layers[0]) if layers else 0
        yield PlanningWork(parts, blocks[0].level, channels, scopes, len(blocks))
