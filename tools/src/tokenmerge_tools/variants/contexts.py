"""Context managers that apply each variant to a model, and restore the model at their end."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, cat, nn

from tokenmerge.api import Patch, merge_in_hosts
from tokenmerge.config import OWN_NUMBER, ToMeConfig
from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge.handle import RecordedPlan
from tokenmerge.models.find import find_hosts
from tokenmerge.report import Report

TOMESD_SETTINGS = (
    *("ratio", "max_downsample", "sx", "sy"),
    *("seed", "merge_attn", "merge_crossattn", "merge_mlp"),
)

# The settings that the time of the oracle depends on.
_BOUNDING = (
    *("ratio", "max_downsample", "min_tokens", "sx", "sy", "st"),
    *("merge_attn", "merge_crossattn", "merge_mlp"),
)


def bounds(config: ToMeConfig) -> bool:
    """Return whether the oracle bounds these settings: they merge around layers, alike at every step."""
    return config.scope == "layers" and not (config.rules or config.correction.on or config.reuse.on)


def bounding_settings(config: ToMeConfig) -> tuple[str, ...]:
    """Return the names of the settings that the time of a configuration's oracle depends on."""
    return (*_BOUNDING, "planner") if config.planner in OWN_NUMBER else _BOUNDING


@contextlib.contextmanager
def dense(model: nn.Module, config: None, report: None) -> Iterator[None]:
    """Leave the model as it is."""
    yield


@contextlib.contextmanager
def tokenmerge(
    model: object, config: ToMeConfig, report: Report | None = None, method: str = ""
) -> Iterator[Patch[Report, RecordedPlan]]:
    """Merge tokens with this package, at any size of the sample."""
    patch = merge_in_hosts(model, config, method=method, check_size=False)
    try:
        yield patch
    finally:
        patch.remove()


@contextlib.contextmanager
def tomesd(model: nn.Module, config: ToMeConfig, report: Report) -> Iterator[None]:
    """Merge tokens with the package tomesd."""
    original: Any = importlib.import_module("tomesd")
    settings = {name: value for name, value in config.to_dict().items() if name in TOMESD_SETTINGS}
    settings["use_rand"] = settings.pop("seed") is not None
    # tomesd leaves its own attributes on the modules when it is removed.
    before = {module: set(module.__dict__) for module in model.modules()}
    try:
        original.apply_patch(model, **settings)
        if not any(type(module).__name__ == "ToMeBlock" for module in model.modules()):
            raise UnsupportedModelError(
                f"tomesd finds no block that it can patch in {type(model).__name__}, so it would run dense; "
                "leave it out"
            )
        yield
    finally:
        original.remove_patch(model)
        for module, names in before.items():
            for name in set(module.__dict__) - names:
                del module.__dict__[name]


@contextlib.contextmanager
def oracle(model: nn.Module, config: ToMeConfig, report: Report) -> Iterator[None]:
    """Merge at no cost: each merging layer runs on its first n − r tokens, and the other r bypass it.

    The images are wrong. No method that merges the same layers at this ratio can be faster.

    The report has the numbers of tokens before and after merging in each block.
    """
    if not bounds(config):
        raise ConfigError(
            "oracle: it needs scope='layers' and the same settings at every step; leave it out otherwise"
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
    """Raise a ConfigError if a layer takes other inputs whose length follows its tokens."""
    for block in (block for host in find_hosts(model) for block in host.blocks):
        for layer in block.layers:
            follows = [argument.name for argument in layer.layout.token_arguments]
            if layer.kind in config.merged_layers and set(follows) - {"attention_mask"}:
                raise ConfigError(
                    f"oracle: {block.path}.{layer.name} takes {', '.join(follows)} with its tokens, which "
                    "the oracle cannot shorten; leave it out for this model"
                )


def _shortened(base: type[nn.Module], tokens: int, kept: int) -> type[nn.Module]:
    """Return a subclass whose forward runs on the first ``kept`` of ``tokens`` tokens [b, tokens, c]."""
    # A plain function, which torch.compile can trace.
    original: Callable[..., Tensor] = base.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        if x.shape[1] != tokens:
            raise ConfigError(
                f"oracle: expected {tokens} tokens, got {x.shape[1]}; it works at one size only"
            )
        if args:
            result = original(self, x[:, :kept], *args[1:], **kwargs)
        else:
            result = original(self, **{**kwargs, "hidden_states": x[:, :kept]})
        # The values do not matter. The copy writes as much as an unmerge.
        if isinstance(result, Tensor):
            return cat([result, x[:, kept:]], dim=1)
        return cat([result[0], x[:, kept:]], dim=1), *result[1:]

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})
