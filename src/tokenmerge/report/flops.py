"""Counts the operations and the cache of a model without its weights."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from tokenmerge.config import StepReuse, ToMeConfig
from tokenmerge.models.base import Host, is_a
from tokenmerge.runtime.memory.caches import Residual
from tokenmerge.runtime.memory.state import LeftAlone, ModelState
from tokenmerge.runtime.patching.patch import new_state, patch_host, restore
from tokenmerge.runtime.patching.watched import is_watching
from tokenmerge.runtime.steps.pipeline import Pipeline

Arguments = Callable[[], dict[str, Any]]  # returns new arguments of a call, by name
# After two full steps the cache of step reuse is largest. The second must not be one of the last steps.
_STEPS_TO_KEEP_MOST = 4
# The results of operations on the meta device and their FLOPs, by their arguments.
_RESULTS: dict[object, tuple[Any, int]] = {}
_MOST_RESULTS = 10_000
# Attributes by which other libraries wrap a module's calls. They may hold references to whole other models.
_WRAPPERS = ("forward", "_old_forward", "_hf_hook", "_diffusers_hook", "_compiled_call_impl")


def weightless(root: nn.Module, on_cpu: Collection[str] = ()) -> nn.Module:
    """Make an unpatched copy of a model on the meta device: its parameters and buffers have no values.

    The parameters in ``on_cpu`` become zeros on the CPU. The copy splits no tokens between devices.
    """
    memo: dict[int, Any] = {}
    for tensor in chain(root.parameters(), root.buffers()):
        # Dtypes that are only for storage, such as float8, are cast before computing.
        dtype = torch.float32 if tensor.is_floating_point() and tensor.itemsize == 1 else tensor.dtype
        empty = _without_values(tensor, dtype)
        memo[id(tensor)] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
    for name in on_cpu:
        parameter = root.get_parameter(name)
        memo[id(parameter)] = nn.Parameter(torch.zeros_like(parameter, device="cpu"), False)
    for module in root.modules():
        memo |= {id(module.__dict__[name]): None for name in _WRAPPERS if name in module.__dict__}
        memo |= _plain_processor(module)
    parallel = getattr(root, "_parallel_config", None)
    if parallel is not None:
        memo[id(parallel)] = None
    copied = copy.deepcopy(root, memo)
    restore(copied)
    for module in copied.modules():
        for name in _WRAPPERS:
            module.__dict__.pop(name, None)
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        processor: Any = getattr(module, "processor", None)
        if hasattr(processor, "_attention_backend"):
            processor._attention_backend = "native"  # other kernels of diffusers know no meta device
    return copied


def _without_values(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor on the meta device that is like another one.

    Some quantized weights, such as those of torchao, can only be copied with their values. They act as dense
    weights of their shape.
    """
    try:
        return torch.empty_like(tensor, device="meta", dtype=dtype)
    except NotImplementedError:
        return torch.empty(tensor.shape, device="meta", dtype=dtype)


def _plain_processor(attention: nn.Module) -> dict[int, Any]:
    """Return the default processor of an attention, by the id of one that may keep what it sees.

    Counting must not call such a processor, whose state a copy may share.
    """
    processor = getattr(attention, "processor", None)
    if processor is None or not is_watching(processor):
        return {}
    module = sys.modules.get("diffusers.models.attention_processor")
    plain = getattr(module, "AttnProcessor2_0", None) if is_a(attention, "Attention") else None
    make = getattr(type(attention), "_default_processor_cls", plain)
    return {} if make is None else {id(processor): make()}


@torch.no_grad()
def count_flops(root: nn.Module, arguments: dict[str, Any]) -> dict[str, int]:
    """Count the FLOPs of one call for every module that runs, by its path after the class of the root.

    The model may be on the meta device, if arguments whose values it reads, such as masks, are on the CPU.
    """
    counts: Counter[nn.Module] = Counter()
    with _Counting() as counting, contextlib.ExitStack() as hooks:

        def note(sign: int, module: nn.Module, *_: Any) -> None:
            counts[module] += sign * counting.flops

        hooks.callback(register_module_forward_pre_hook(functools.partial(note, -1)).remove)
        hooks.callback(register_module_forward_hook(functools.partial(note, 1)).remove)
        root(**arguments)
    modules = {f"{type(root).__name__}.{path}": module for path, module in root.named_modules()}
    return {path.removesuffix("."): counts[module] for path, module in modules.items() if module in counts}


class _Counting(TorchDispatchMode):
    """Runs operations on the meta device, and counts their FLOPs.

    If only some inputs of an operation are on it, the others are moved there. Operations are repeated in most
    blocks and cost a millisecond of Python each, so the shapes of their results and their FLOPs are cached.
    """

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_meta = {one.is_meta for one in arg_tree_leaves(*args, **kwargs) if isinstance(one, Tensor)}
        # Indices keep their values, because the values of a mask determine the shape of the result.
        if func is not torch.ops.aten.index.Tensor and len(on_meta) > 1:
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
            on_meta = {True}
        if _is_composite(func):  # in inference mode; its parts are counted
            with self:
                return func.decompose(*args, **kwargs)
        if on_meta != {True} or _aliases(func):
            result = func(*args, **kwargs)
            self.flops += _flops(func, args, kwargs, result)
            return result
        call = func, _key(args), _key(tuple(kwargs.items()))
        known = _RESULTS.get(call)
        if known is None:
            if len(_RESULTS) >= _MOST_RESULTS:
                _RESULTS.clear()
            result = func(*args, **kwargs)
            known = (result, _flops(func, args, kwargs, result))
            _RESULTS[call] = known
        result, flops = known
        self.flops += flops
        return _new(result) if isinstance(result, Tensor) else tree_map_only(Tensor, _new, result)


def _flops(func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> int:
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


@functools.cache
def _is_composite(func: Any) -> bool:
    return func._overloadpacket not in flop_registry and func._can_decompose()


@functools.cache
def _aliases(func: Any) -> bool:
    """Return whether an operation changes an argument, or its result may be a view of one."""
    schema = func._schema
    return any(one.alias_info is not None for one in (*schema.arguments, *schema.returns))


def _key(value: Any) -> Any:
    """Return a hashable description of an argument: its type and value, since 1, 1.0 and True are equal."""
    # The structures of PyTorch's pytree would do, but they have no hash in PyTorch 2.7.
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return type(value), tuple(map(_key, value)) if isinstance(value, list | tuple) else value


def _new(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@contextlib.contextmanager
def patched(host: Host, config: ToMeConfig, left_alone: LeftAlone) -> Iterator[ModelState]:
    """Within the context, patch a host that is not patched."""
    state = new_state(host, config, Pipeline())
    state.all_left_alone.set(left_alone)
    patch_host(host, state)
    try:
        yield state
    finally:
        restore(host.root)


class StepCounts(NamedTuple):
    """What the steps of a generation cost."""

    flops: tuple[int, ...]  # operations of a call in each step
    cached: int  # the most bytes of corrections, residuals and plans that are cached between two steps


def count_steps(
    host: Host,
    config: ToMeConfig,
    steps: int,
    arguments: Arguments,
    left_alone: LeftAlone,
    first: int | None = None,
) -> StepCounts:
    """Count the operations of an unpatched model in each step of a generation, and what it caches.

    With ``first``, only so many steps are counted, from the first one on.
    """
    name = type(host.root).__name__
    counts: dict[tuple[object, ...], int] = {}
    kind: tuple[object, ...] = ()
    found = []
    cached = 0
    with patched(host, config, left_alone) as state:

        def stop_if_known(root: nn.Module, args: tuple) -> None:
            nonlocal kind
            kind = _kind_of_call(state)
            if kind in counts:
                raise _Known

        host.root.register_forward_pre_hook(stop_if_known)
        for index in range(steps if first is None else first):
            state.pipeline.set_step(index, steps)
            with contextlib.suppress(_Known):
                counts[kind] = count_flops(host.root, arguments())[name]  # the call sets ``kind`` first
                cached = max(cached, _cached_bytes(state))
            found.append(counts[kind])
    return StepCounts(tuple(found), cached if _caches(config) else 0)


class _Known(Exception):
    """Raised to stop a call whose operations have been counted before."""


def _kind_of_call(state: ModelState) -> tuple[object, ...]:
    """Return what the operations of the running call depend on, apart from the sizes of its arguments."""
    context = state.context
    tracker = state.threads.value.memory.tracker
    plans = tracker.noted.get((tracker.call, "plans"), (tracker.index,))[0] == tracker.index
    return (
        # The first call has no correction to add, and no step before it.
        tracker.index == 0,
        plans,
        tuple(context.settings.items()),
        context.decision.merging,
        context.decision.kind,
        context.guidance_difference is None,
    )


def _cached_bytes(state: ModelState) -> int:
    """Return the bytes of what a patched model has cached for the next step."""
    memory = state.threads.value.memory
    tensors: list[Any] = list(memory.model_residuals.values())
    for cache in memory.caches:
        tensors += chain(*cache.plans.values(), *cache.residuals.values())
        # These are the outputs of the runs of blocks and of the stages that are skipped.
        skipped = [getattr(one, "residual", one) for one in cache.skippable.values()]
        residuals = [one for one in skipped if isinstance(one, Residual)]
        tensors += [tensor for one in residuals for tensor in (*one.latest, *one.delta)]
    once = {id(tensor): tensor for tensor in tensors if isinstance(tensor, Tensor)}
    return sum(tensor.nbytes for tensor in once.values())


def kept_bytes(host: Host, config: ToMeConfig, arguments: Arguments, left_alone: LeftAlone) -> int:
    """Count the bytes that an unpatched model caches between steps, if it is not known how many there are."""
    if not _caches(config):
        return 0
    # The same cache, in a generation of only a few steps.
    every = _STEPS_TO_KEEP_MOST if config.reuse.on else 1
    reuse = StepReuse(every=every, shallow_every=every if config.reuse.skips_finest else 1)
    short = dataclasses.replace(merging_most(config), reuse=reuse)
    return count_steps(host, short, _STEPS_TO_KEEP_MOST, arguments, left_alone, first=2).cached


def _caches(config: ToMeConfig) -> bool:
    """Return whether anything is cached between steps."""
    results = config.correction.on or config.reuse.on or config.cached_features is not None
    return results or config.merge_sharing.every > 1


def merging_most(config: ToMeConfig) -> ToMeConfig:
    """Return the settings of the step that merges most."""
    return max(config.phases(), key=lambda phase: phase.ratio)
