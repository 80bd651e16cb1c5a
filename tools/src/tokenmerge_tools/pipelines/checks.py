"""Checks that need only a model's configs, and so run before weights are loaded."""

from __future__ import annotations

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError
from tokenmerge.models.find import find_hosts
from tokenmerge.report import check_merging as check_hosts
from tokenmerge_tools.method_spec import MethodSpec
from tokenmerge_tools.pipelines.meta_model import ModelSketch
from tokenmerge_tools.pipelines.sizes import check_size


def check_merging(sketch: ModelSketch, size: tuple[int, int], method: MethodSpec) -> None:
    """Check that a method merges something in a model.

    A method that chooses its settings by the model is not checked.

    Raises:
        ConfigError: the size or the settings do not fit the model.
        NothingToMergeError: no block would merge at this size.
    """
    width, height = check_size(size, sketch.scale)
    if not method.needs_model:
        check_hosts(find_hosts(sketch.denoiser), method.config(), (height, width))


def check_compile(config: ToMeConfig) -> None:
    """Check that settings work with ``torch.compile`` of the whole model.

    Raises:
        ConfigError: they change over the denoising steps, but one graph is the same at every step.
    """
    if config.follows_steps:
        raise ConfigError(
            "compile: settings that follow the denoising steps cannot be compiled into one graph with the "
            "model; leave --compile out, or take a method that is the same at every step"
        )
