"""What other nodes do to the same model, and what this node leaves to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tokenmerge.config import StepReuse

if TYPE_CHECKING:
    from tokenmerge.integrations.comfyui.settings import Settings


@dataclasses.dataclass(frozen=True)
class Others:
    """Names of other nodes that matter to merging and step reuse.

    Attributes:
        before_attention: those with a patch before self-attention, which may regroup its tokens, as HyperTile
            and TomePatchModel do.
        self_attention: those that replace self-attention, which may read it, as SelfAttentionGuidance does.
        cache: the one that skips whole steps; None: there is none.
    """

    before_attention: tuple[str, ...] = ()
    self_attention: tuple[str, ...] = ()
    cache: str | None = None

    @property
    def regroup(self) -> str:
        """What happens where tokens are regrouped before they could merge, as a sentence."""
        names = " and ".join(self.before_attention)
        return (
            f"Self-attention does not merge where its tokens are regrouped by {names}; keep one of the nodes."
        )


def others_in(options: Mapping[str, Any]) -> Others:
    """Return the other nodes that have changed ComfyUI's ``transformer_options``."""
    replaced, cache = options.get("patches_replace", {}), options.get("easycache")
    return Others(
        _nodes_of(options.get("patches", {}).get("attn1_patch", ())),
        _nodes_of(replaced.get("attn1", {}).values()),
        None if cache is None else cache.name,
    )


def beside(settings: Settings, options: Mapping[str, Any]) -> Settings:
    """Return the settings beside the other nodes in ComfyUI's ``transformer_options``.

    The last notes say what they change.
    """
    config, target, others, notes = settings.config, settings.target, others_in(options), []
    default = settings.default
    if not target.is_unet:
        others = Others(cache=others.cache)  # ComfyUI calls the patches of attention in UNets only
    attention = " and ".join(others.self_attention)
    if config.reuse.on and (attention or others.cache):
        config = dataclasses.replace(config, reuse=StepReuse())
        default = default and default.without_reuse()
        if others.cache:
            why = f"since {others.cache} skips whole steps; keep one of the nodes"
        else:
            why = f"since {attention} may read self-attention in every step"
        notes.append(f"No part of the model is skipped, {why}.")
    if attention:
        notes.append(f"Self-attention that {attention} replaced stays dense.")
    blocks = options.get("patches_replace", {}).get("dit", {})
    later = " and ".join(_nodes_of(blocks[own.key] for own in target.blocks if own.key in blocks))
    if later:
        notes.append(
            f"Blocks that {later} replaced after Token Merging may not merge; place Token Merging after it."
        )
    return dataclasses.replace(
        settings, config=config, default=default, others=others, notes=(*settings.notes, *notes)
    )


def _nodes_of(patches: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of the other nodes that made patches, which are mostly functions in their methods."""
    names = (
        str(getattr(patch, "__qualname__", type(patch).__qualname__)).partition(".")[0]
        for patch in patches
        if not str(getattr(patch, "__module__", "")).startswith("tokenmerge.")
    )
    return tuple(dict.fromkeys(name if name.isidentifier() else "another node" for name in names))
