"""Applies a rival anew in each call of a pipeline, and tells it which step and pass of guidance runs."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import Tensor, nn

from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge_tools.pipelines.loading import denoiser_of


class Generation:
    """One call of a pipeline by a rival, with its arguments by name. They are empty before the first call.

    ``index`` is the number of finished steps. ``turn`` is the index of the denoiser's call within this step,
    since guidance may need two calls.
    """

    def __init__(self, name: str, pipe: Any, call: inspect.BoundArguments | None = None) -> None:
        self.name = name
        self.pipe = pipe
        self.call = call
        self.arguments: dict[str, Any] = {} if call is None else call.arguments
        self.model: nn.Module = denoiser_of(pipe)
        self.index = 0
        self.turn = -1

    @property
    def steps(self) -> int:
        """Number of steps, known from the first one on."""
        return len(self.pipe.scheduler.timesteps)

    def timestep(self) -> float:
        """Return the timestep of this step, from 1000 to 0."""
        return float(self.pipe.scheduler.timesteps[min(self.index, self.steps - 1)])

    def sigma(self) -> float:
        """Return the share of noise in the sample of this step, from 1 to 0."""
        sigmas = getattr(self.pipe.scheduler, "sigmas", None)
        if sigmas is None:
            return self.timestep() / 1000
        sigma = float(sigmas[min(self.index, len(sigmas) - 1)])
        return sigma if float(sigmas.max()) <= 1 else sigma / (1 + sigma)

    def again(self, pipe: Any, **changes: Any) -> Any:
        """Make the same call of another pipeline, with changes to those arguments that it has."""
        assert self.call is not None
        call = self.call.signature.bind(*self.call.args, **self.call.kwargs)
        call.arguments.update({name: one for name, one in changes.items() if name in call.arguments})
        return pipe(*call.args[1:], **call.kwargs)

    def refuse(self, why: str) -> NoReturn:
        """Raise the error that says why the rival does not run on this model."""
        raise UnsupportedModelError(f"{self.name} {why}; leave it out")


@contextlib.contextmanager
def in_each_call(
    name: str,
    pipe: Any,
    begin: Callable[[Generation], contextlib.AbstractContextManager[None]],
    check: Callable[[Generation], object] = lambda now: None,
) -> Iterator[None]:
    """Enter a context around each call of a pipeline, and leave the modules of its denoiser as they were.

    Within the context, the pipeline has a class of its own, so that other pipelines of the same class do not
    change. ``check`` refuses a pipeline on which the rival does not run.
    """
    check_pipeline(name, pipe)
    check(Generation(name, pipe))
    cls: Any = type(pipe)
    parameters = inspect.signature(cls.__call__)

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = parameters.bind(self, *args, **kwargs)
        bound.apply_defaults()
        pipeline_class = type(self)
        self.__class__ = _subclass(cls, {})
        try:
            now = Generation(name, self, bound)
            with as_before(now.model), _counting_steps(now), begin(now):
                return self(*args, **kwargs)
        finally:
            self.__class__ = pipeline_class

    pipe.__class__ = _subclass(cls, {"__call__": call})
    try:
        yield
    finally:
        pipe.__class__ = cls


@contextlib.contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Undo at the end what was set, replaced or added among the attributes of a model's modules."""
    before = {module: dict(module.__dict__) for module in model.modules()}
    try:
        yield
    finally:
        for module, attributes in before.items():
            for added in set(module.__dict__) - set(attributes):
                del module.__dict__[added]
            module.__dict__.update(attributes)


@contextlib.contextmanager
def _counting_steps(now: Generation) -> Iterator[None]:
    scheduler = now.pipe.scheduler
    step = scheduler.step

    @functools.wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        now.index = now.index + 1
        now.turn = -1
        return step(*args, **kwargs)

    def begin(*_: Any) -> None:
        now.turn += 1

    handle = now.model.register_forward_pre_hook(begin)
    scheduler.step = counted
    try:
        yield
    finally:
        handle.remove()
        del scheduler.step


def _subclass(cls: type, methods: dict[str, Any]) -> Any:
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, **methods})


def check_pipeline(name: str, pipe: object) -> None:
    """Raise a ConfigError if a rival that follows the denoising steps gets only a denoiser."""
    if isinstance(pipe, nn.Module):
        raise ConfigError(
            f"{name} needs the denoising steps of a pipeline; give a pipeline, not its denoiser"
        )


def sample_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the noisy sample among the arguments of a denoiser."""
    if args:
        found: Tensor = args[0]
    elif "hidden_states" in kwargs:
        found = kwargs["hidden_states"]
    else:
        found = kwargs["sample"]
    return found


def transformer_blocks(now: Generation) -> list[nn.Module]:
    """Return the blocks of a transformer in order, or refuse a model whose blocks diffusers does not know."""
    from diffusers.hooks._common import _ALL_TRANSFORMER_BLOCK_IDENTIFIERS as NAMES

    blocks: list[nn.Module] = []
    for name, child in now.model.named_children():
        if name in NAMES and isinstance(child, nn.ModuleList):
            blocks += child
    with contextlib.suppress(ValueError):
        if len(blocks) > 1 and all(map(about, blocks)):
            return blocks
    now.refuse(f"does not know the transformer blocks of {type(now.model).__name__}")


def about(block: nn.Module) -> Any:
    """Return what diffusers knows about the arguments and the output of a block, or raise a ValueError."""
    from diffusers.hooks._helpers import TransformerBlockRegistry

    return TransformerBlockRegistry.get(type(block))
