"""Apply each variant to a model, as context managers that leave no trace."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, cat, nn

from tokenmerge.api import Patch, token_merging
from tokenmerge.config import Schedule, ToMeConfig
from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge.models.find import find_hosts
from tokenmerge.planners import OWN_NUMBER
from tokenmerge.report import Report
from tokenmerge.runtime.state import RecordedPlan

__all__ = [
    "TOMESD_SETTINGS",
    "bounding_settings",
    "bounds",
    "dense",
    "oracle",
    "tokenmerge",
    "tomesd",
    "tomesd_missing",
]

TOMESD_SETTINGS = (
    *("ratio", "max_downsample", "sx", "sy"),
    *("use_rand", "merge_attn", "merge_crossattn", "merge_mlp"),
)


# What the time of the oracle depends on.
_BOUNDING = (
    *("ratio", "max_downsample", "min_tokens", "sx", "sy", "st"),
    *("merge_attn", "merge_crossattn", "merge_mlp"),
)


def bounds(config: ToMeConfig) -> bool:
    """Whether the oracle is the bound of merging with these settings: around layers, alike at every step."""
    changing = config.schedule != Schedule() or config.correction.every or config.reuse.every > 1
    return config.scope == "layers" and not (changing or config.levels)


def bounding_settings(config: ToMeConfig) -> tuple[str, ...]:
    """Names of the settings that the bound of a configuration depends on."""
    return (*_BOUNDING, "planner") if config.planner in OWN_NUMBER else _BOUNDING


@contextlib.contextmanager
def dense(model: nn.Module, config: None, report: None) -> Iterator[None]:
    """Leave the model as it is."""
    yield


@contextlib.contextmanager
def tokenmerge(model: object, config: ToMeConfig, report: Report) -> Iterator[Patch[Report, RecordedPlan]]:
    """Merge tokens with this package."""
    with token_merging(model, config) as patch:
        yield patch


@contextlib.contextmanager
def tomesd(model: nn.Module, config: ToMeConfig, report: Report) -> Iterator[None]:
    """Merge tokens with the package tomesd.

    Raises:
        UnsupportedModelError: it finds no block in the model, which tomesd does not report itself.
    """
    original: Any = importlib.import_module("tomesd")
    settings = {name: value for name, value in config.to_dict().items() if name in TOMESD_SETTINGS}
    # tomesd leaves its own attributes on the modules when it is removed.
    before = {module: set(module.__dict__) for module in model.modules()}
    try:
        original.apply_patch(model, **settings)
        if not any(type(module).__name__ == "ToMeBlock" for module in model.modules()):
            raise UnsupportedModelError(
                f"tomesd finds no block that it knows in {type(model).__name__}, and would run dense unsaid"
            )
        yield
    finally:
        original.remove_patch(model)
        for module, names in before.items():
            for name in set(module.__dict__) - names:
                del module.__dict__[name]


def tomesd_missing() -> str | None:
    """Why tomesd cannot run here; None if it can."""
    found = importlib.util.find_spec("tomesd") is not None
    return None if found else "tomesd is not installed; run: pip install tomesd==0.1.3"


@contextlib.contextmanager
def oracle(model: nn.Module, config: ToMeConfig, report: Report) -> Iterator[None]:
    """Run each layer that would merge on its first n − r tokens and pass the other r by: merging at no cost.

    The pictures are wrong; the time is the bound for every method that merges the same layers at this ratio.

    Raises:
        ConfigError: not single layers would merge, or layers that take more than image tokens.
    """
    if not bounds(config):
        raise ConfigError(
            "oracle: it bounds scope='layers', alike at every step; leave it out for other settings"
        )
    _check_shortening(model, config)
    swapped: dict[nn.Module, type[nn.Module]] = {}
    try:
        for row in report.rows:
            block = model.get_submodule(row.path)
            for name in row.merged.split("+"):
                layer = block.get_submodule(name)
                swapped[layer] = type(layer)
                layer.__class__ = _shortened(type(layer), row.tokens, row.merged_tokens)
        if not swapped:
            raise ConfigError("oracle: nothing would merge with these settings, so there is nothing to bound")
        yield
    finally:
        for layer, base in swapped.items():
            layer.__class__ = base


def _check_shortening(model: nn.Module, config: ToMeConfig) -> None:
    """Refuse a model whose layers take more than tokens that would have to be shortened."""
    for block in (block for host in find_hosts(model) for block in host.blocks):
        for layer in block.layers:
            follows = [argument.name for argument in layer.layout.token_arguments]
            if layer.kind in config.merged_layers and set(follows) - {"attention_mask"}:
                raise ConfigError(
                    f"oracle: {block.path}.{layer.name} takes {', '.join(follows)} with its tokens, which it "
                    "does not know how to shorten; leave it out for this model"
                )


def _shortened(base: type[nn.Module], tokens: int, kept: int) -> type[nn.Module]:
    """A subclass whose forward sees the first ``kept`` of ``tokens`` tokens ``[b, tokens, c]``."""
    # A plain function, which torch.compile can follow.
    original: Callable[..., Tensor] = base.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        if x.shape[1] != tokens:
            raise ConfigError(f"oracle: expected {tokens} tokens, got {x.shape[1]}; it is made for one size")
        if args:
            result = original(self, x[:, :kept], *args[1:], **kwargs)
        else:
            result = original(self, **{**kwargs, "hidden_states": x[:, :kept]})
        # The values do not matter. The copy costs as much as an unmerge would write.
        if isinstance(result, Tensor):
            return cat([result, x[:, kept:]], dim=1)
        return cat([result[0], x[:, kept:]], dim=1), *result[1:]

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})
