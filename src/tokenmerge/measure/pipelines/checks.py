"""What can be refused before weights are loaded, because a model's configs tell it."""

from __future__ import annotations

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError
from tokenmerge.measure.method_spec import MethodSpec
from tokenmerge.measure.pipelines.loading import ModelSketch
from tokenmerge.measure.pipelines.sizes import check_size
from tokenmerge.models.find import find_hosts
from tokenmerge.runtime.patch import check_host

__all__ = ["check_compile", "check_merging"]


def check_merging(sketch: ModelSketch, size: tuple[int, int], method: MethodSpec) -> None:
    """Make sure that a method merges something in a model.

    Args:
        sketch: the model without its weights.
        size: (width, height) in pixels.
        method: one that chooses by the model is not checked; it chooses what fits.

    Raises:
        ConfigError: the size does not fit the model, or the settings do not.
        NothingToMergeError: no block would merge at this size.
    """
    width, height = check_size(size, sketch.scale)
    if not method.needs_model:
        for host in find_hosts(sketch.denoiser):
            check_host(host, method.config(), (height, width))


def check_compile(config: ToMeConfig) -> None:
    """Make sure that settings go together with ``torch.compile`` of the whole model.

    Raises:
        ConfigError: they follow the denoising steps, and one graph is the same at every step.
    """
    if config.follows_steps:
        raise ConfigError(
            "compile: settings that follow the denoising steps cannot be compiled into one graph with the "
            "model; leave --compile out, or take a method that is the same at every step"
        )
