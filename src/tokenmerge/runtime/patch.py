"""The only file that changes a module, and puts back what was there.

A block or a layer of it is changed by swapping its class for a subclass of the same name whose one method
merges its input, calls the method of the original class and unmerges the result. Nothing of the host's code
is copied, its parameters keep their names, and hooks, adapters and attention processors stay where they are.
The models around it keep their classes, which pipelines compare, and get hooks that note the step or the
token grid; of a UNet, parts that are left out of steps are changed as blocks are.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import NothingToMergeError, UnsupportedModelError
from tokenmerge.models.base import KINDS, Block, Host, Layer
from tokenmerge.models.layout import Grid
from tokenmerge.runtime.caches import Plans, Stack
from tokenmerge.runtime.forward import (
    COMPILED,
    block_call,
    compiled_block,
    layer_call,
    parameters,
    stage_call,
)
from tokenmerge.runtime.hooks import check_grid, note_call, note_end, note_grid, note_result
from tokenmerge.runtime.state import STATE, BlockState, LayerState, Run, StageState

__all__ = [
    "check_host",
    "check_swappable",
    "hosts_that_merge",
    "layers_to_merge",
    "merges",
    "new_run",
    "note",
    "patch_host",
    "restore",
    "run_of",
    "swap",
]


def hosts_that_merge(
    hosts: Sequence[Host], config: ToMeConfig, size: tuple[int, int] | None
) -> tuple[list[Host], list[NothingToMergeError]]:
    """Check all models of a pipeline before any is changed.

    Args:
        hosts: the models.
        config: what to merge and how much.
        size: height and width of the sample; None: what each model was made for.

    Returns:
        The hosts that merge, and why others, ControlNets beside a denoiser that merges, stay dense.

    Raises:
        NothingToMergeError: the denoiser, or a ControlNet without a denoiser, would merge nothing.
        UnsupportedModelError: a block cannot be patched.
    """
    merging, left_dense = [], []
    for host in hosts:
        beside = not host.controlnet and any(other.controlnet for other in hosts)
        if config.merges_stacks and host.between and beside:
            raise UnsupportedModelError(
                f"scope='stack' leaves tokens merged from block to block of {type(host.root).__name__}, and "
                "the ControlNet adds to them there; take scope='block', with share_plan=True for one plan"
            )
        try:
            check_host(host, config, size or host.sample_size)
            merging.append(host)
        except NothingToMergeError as error:
            if not host.controlnet:
                raise
            left_dense.append(error)
    if not merging:
        raise left_dense[0]
    return merging, left_dense


def check_host(host: Host, config: ToMeConfig, size: tuple[int, int] | None) -> None:
    """Find out, before anything is changed, whether the host would merge.

    Args:
        host: the model.
        config: what to merge and how much.
        size: height and width of the sample, if known.

    Raises:
        NothingToMergeError: it has no block that would merge.
        UnsupportedModelError: a block cannot be patched.
    """
    blocks = _blocks_to_merge(host, config)
    if not blocks:
        raise NothingToMergeError(_why_nothing(host, config))
    if config.reuse_every > 1 and not (host.can_pause or host.controlnet):
        raise UnsupportedModelError(
            f"reuse_every={config.reuse_every}: no part of {type(host.root).__name__} can be left out of a "
            "step; take reuse_every=1"
        )
    if config.reuse_every > 1 and config.merges_stacks and not (host.below or host.controlnet):
        raise UnsupportedModelError(
            f"reuse_every={config.reuse_every}: in a stack no block alone has all tokens, and of "
            f"{type(host.root).__name__} nothing but blocks can be left out of a step; take scope='block' "
            "or reuse_every=1"
        )
    if size is not None:
        rows, columns = (-(-side // host.patch) for side in size)
        check_grid(new_run(host, config), (host.frames, rows, columns))
    for block in blocks:
        check_swappable(block.module, block.path, block.method)
        for layer in layers_to_merge(block, config):
            module = getattr(block.module, layer.name)
            check_swappable(module, f"{block.path}.{layer.name}", "forward")
    for path, _, _ in _pausing(host, config):
        check_swappable(host.root.get_submodule(path), path, "forward")


def _why_nothing(host: Host, config: ToMeConfig) -> str:
    name = type(host.root).__name__
    if not host.blocks:
        return (
            f"nothing to merge: {name} has no transformer block; token merging needs a model with attention"
        )
    blocks = [block for block in host.blocks if merges(block, config)]
    if not blocks and config.scope != "layers":
        what = {
            "block": "run on merged tokens as a whole",
            "stack": "run on merged tokens together with its neighbours",
            "keys": "be given its keys apart",
        }
        other = "block" if config.scope == "stack" and any(b.wide for b in host.blocks) else "layers"
        return (
            f"nothing to merge: no transformer block of {name} can {what[config.scope]}, as "
            f"scope={config.scope!r} needs; take scope={other!r}"
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


def new_run(host: Host, config: ToMeConfig) -> Run:
    """What the blocks of a host will share."""
    levels = sorted({block.level for block in _blocks_to_merge(host, config)})
    names = parameters(type(host.root).forward)
    return Run(
        config,
        host.sample,
        host.timestep,
        names,
        host.grid,
        tuple(levels),
        host.latents,
        host.between,
        host.patch,
    )


def patch_host(host: Host, run: Run) -> None:
    """Patch a host that :func:`check_host` accepts and that is not patched."""
    grids: dict[nn.Module, Grid] = {}
    shared: dict[tuple[int, bool, str], Plans] = {}
    run.blocks.clear()
    run.layers.clear()
    run.below.clear()
    run.finest.clear()
    for block in _blocks_to_merge(host, run.config):
        grid = run.grid if block.grid is None else grids.setdefault(block.grid, Grid())
        layer_states = layers_to_merge(block, run.config)
        state = BlockState(run, block.level, grid, block.path, block.layout, block.batched, block.wide)
        if run.config.share_plan:
            # On a UNet's way up tokens are alike in other ways than on its way down.
            way = block.path.partition(".")[0]
            state.plans = shared.setdefault((block.level, block.batched, way), state.plans)
        run.blocks.append(state)
        swap(block.module, block.method, block_call, state)
        for layer in layer_states:
            layer_state = LayerState(state, layer.kind, layer.layout, layer.own_keys, layer.keys)
            run.layers.append(layer_state)
            swap(getattr(block.module, layer.name), "forward", layer_call, layer_state)
    _join_stacks(run, {block.path: block for block in host.blocks})
    for module, grid in grids.items():
        note(module, note_grid, grid)
    for path, finest, is_last in _pausing(host, run.config):
        module = host.root.get_submodule(path)
        stage_state = StageState(run, finest, is_last, grids.get(module))
        (run.finest if finest else run.below).append(stage_state)
        swap(module, "forward", stage_call, stage_state)
    note(host.root, note_call, run)
    if run.config.follows_steps:
        host.root.register_forward_hook(note_end)
    if run.config.asks_guidance:
        host.root.register_forward_hook(note_result)


def _join_stacks(run: Run, blocks: Mapping[str, Block]) -> None:
    """Tell blocks which stack they are in; of a model on several devices each has stacks of its own."""

    def where(state: BlockState) -> tuple[str | None, Any]:
        block = blocks[state.path]
        weight = next(block.module.parameters(), None)
        return block.stack if block.wide else None, None if weight is None else weight.device

    for (name, _), joined in itertools.groupby(run.blocks, where):
        if name is not None:
            states, stack = list(joined), Stack()
            for state in states:
                state.stack = stack
            states[0].is_first = states[-1].is_last = True


def run_of(root: nn.Module) -> Run | None:
    """What the blocks of a patched model share; None for a model that is not patched."""
    return root.__dict__.get(STATE)


def restore(root: nn.Module) -> None:
    """Give every module of a model back what it had; a model that is not patched stays as it is."""
    for module in root.modules():
        if STATE in module.__dict__:
            if isinstance(state := module.__dict__[STATE], Run):  # whoever holds the handle holds it
                state.same.forget()
                state.forget()
            if hasattr(type(module), "_tokenmerge_base"):
                _unswap(module)
            _unnote(module)


def _pausing(host: Host, config: ToMeConfig) -> Iterator[tuple[str, bool, bool]]:
    """What of a UNet does not run on every step: path, whether at its finest level, whether last there."""
    if config.reuse_every > 1:
        yield from ((path, False, path == host.below[-1]) for path in host.below)
    if config.reuse_finest_every > 1:
        yield from ((path, True, path == host.finest[-1]) for path in host.finest)


def _blocks_to_merge(host: Host, config: ToMeConfig) -> list[Block]:
    """The blocks within ``max_downsample`` in which something merges."""
    return [block for block in host.blocks if block.level <= config.max_downsample and merges(block, config)]


def merges(block: Block, config: ToMeConfig) -> bool:
    """Whether something of a block can merge, in some phase."""
    return any(
        _runs_whole(block, stage) if stage.whole_blocks else bool(_layers(block, stage))
        for stage in config.stages(block.level)
    )


def _runs_whole(block: Block, stage: ToMeConfig) -> bool:
    return block.wide is not None and (block.stack is not None or stage.scope != "stack")


def layers_to_merge(block: Block, config: ToMeConfig) -> list[Layer]:
    """The sub-layers whose calls change, in some phase."""
    wanted = {layer.name for stage in config.stages(block.level) for layer in _layers(block, stage)}
    return [layer for layer in block.layers if layer.name in wanted]


def _layers(block: Block, stage: ToMeConfig) -> list[Layer]:
    if stage.scope == "keys":
        return [layer for layer in block.layers if layer.keys is not None]
    if stage.whole_blocks:  # its attention counts merged tokens for as many as they stand for
        attention = [layer for layer in block.layers if layer.kind == "attn1" and layer.own_keys]
        return attention if stage.proportional else []
    return [layer for layer in block.layers if layer.kind in stage.merged_layers]


_swapped_classes: dict[tuple[type, str, Callable], Any] = {}


def _swapped_class(base: type[nn.Module], method: str, call: Callable[[Callable], Callable]) -> Any:
    """The subclass of ``base`` whose ``method`` is ``call(base.method)``.

    There is one for each combination, so that all modules of a class share their compiled code.
    """
    key = (base, method, call)
    if key not in _swapped_classes:
        members: dict[str, Any] = {method: call(getattr(base, method))}
        if call is block_call:
            members[COMPILED] = compiled_block(parameters(base.forward))
        _swapped_classes[key] = type(
            base.__name__,
            (base,),
            {
                **members,
                "__module__": base.__module__,
                "__qualname__": base.__qualname__,
                "__doc__": base.__doc__,
                "__reduce_ex__": lambda self, protocol: (_rebuild, key, self.__getstate__()),
                "_tokenmerge_base": base,
                "_tokenmerge_method": method,
            },
        )
        _announce(_swapped_classes[key], base)
    return _swapped_classes[key]


def _rebuild(base: type, method: str, call: Callable[[Callable], Callable]) -> nn.Module:
    """An empty module of a swapped class, for pickle and deepcopy: the class itself has no import path."""
    cls = _swapped_class(base, method, call)
    return cls.__new__(cls)


def _announce(swapped: type, base: type) -> None:
    """Tell diffusers' block caches, which look blocks up by exact class, what they know of the original."""
    hooks = sys.modules.get("diffusers.hooks._helpers")
    if hooks is None:
        return
    try:
        known = hooks.TransformerBlockRegistry.get(base)
    except ValueError:  # blocks of this class cannot be cached
        return
    hooks.TransformerBlockRegistry.register(swapped, copy.copy(known))


def swap(module: nn.Module, method: str, call: Callable[[Callable], Callable], state: object) -> None:
    """Make ``method`` of a module ``call`` of what it was, with ``state`` in reach until it is restored."""
    base = type(module)
    module.__class__ = _swapped_class(base, method, call)
    module.__dict__[STATE] = state
    _rebind_hooks(module, getattr(base, method))


def _unswap(module: nn.Module) -> None:
    swapped: Any = type(module)
    module.__class__ = swapped._tokenmerge_base
    _rebind_hooks(module, getattr(swapped, swapped._tokenmerge_method))


def note(module: nn.Module, hook: Callable, state: object) -> None:
    """Run ``hook``, of this package, before a module, with ``state`` in reach until it is restored."""
    module.__dict__[STATE] = state
    module.register_forward_pre_hook(hook, with_kwargs=True)


def _unnote(module: nn.Module) -> None:
    del module.__dict__[STATE]
    # By the function itself: on a copied module the handle that torch hands out would not be the copy's.
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if getattr(hook, "__module__", "").startswith("tokenmerge."):
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _rebind_hooks(module: nn.Module, before: FunctionType) -> None:
    """Where hooks keep the original ``forward`` of a module, put that of its present class."""
    for holder, name in _hooked_forwards(module, before):
        now = MethodType(type(module).forward, module)
        if holder is module:
            module.__dict__[name] = now
        else:
            setattr(holder, name, now)


def _hooked_forwards(module: nn.Module, function: FunctionType) -> Iterator[tuple[Any, str]]:
    """Places that hold ``function`` bound to the module.

    Such are the innermost ends of the hook chains of accelerate and of diffusers, and the ``forward`` that
    the latter leaves on a module when its hooks are removed.
    """
    places = [(module, "forward", module.__dict__), (module, "_old_forward", module.__dict__)]
    for reference in getattr(module.__dict__.get("_diffusers_hook"), "_fn_refs", ()):
        places += [(reference, name, vars(reference)) for name in ("forward", "original_forward")]
    for holder, name, attributes in places:
        value = attributes.get(name)
        if isinstance(value, MethodType) and value.__self__ is module and value.__func__ is function:
            yield holder, name


def check_swappable(module: nn.Module, path: str, method: str) -> None:
    """Refuse a module whose own attribute would hide the method of its class."""
    hidden = method in module.__dict__
    if hidden and not any(True for _ in _hooked_forwards(module, getattr(type(module), method))):
        raise UnsupportedModelError(
            f"{path}: other software has replaced its method {method!r} on the module itself, so that "
            "merging would have no effect; remove that first, apply token merging, then put it back"
        )
