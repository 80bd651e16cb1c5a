"""Patches a vision transformer: the checks before, and the methods of its modules.

The paper merges between attention and MLP, in the middle of a layer's forward. Here the MLP and its norm run
on merged tokens, their result is unmerged so that the host can add it, and the result of the layer is merged.
This is the same: the mean of equal tokens is that token, so merge(x + unmerge(mlp(norm(merge(x))))) equals
merge(x) + mlp(norm(merge(x))).

A call may collect the tokens of its layers. Then each layer unmerges its result, so that every token of the
input has its place in what is collected, and takes one of the equal tokens of each group as its own input.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.errors import NothingToMergeError, UnsupportedModelError
from tokenmerge.models.call import HostCall, HostMethod, parameters
from tokenmerge.models.find import parts
from tokenmerge.runtime.memory.state import STATE
from tokenmerge.runtime.memory.uses import CHANGES, MARK, Mark, Uses
from tokenmerge.runtime.patching.patch import restore
from tokenmerge.runtime.patching.swap import add_hook, check_swappable, swap
from tokenmerge.runtime.steps.pipeline import PerThread
from tokenmerge.vit.config import ViTConfig
from tokenmerge.vit.hosts import FAMILIES, Encoder, EncoderLayer, find_encoders
from tokenmerge.vit.planner import RecordedTokens, SizedPlan, most_removed, plan_by_size, plan_tome_vit

# The keyword argument that carries through the layers of a call what their tokens stand for: a list with an
# entry for the input of each layer, None where nothing has merged. It is an argument because gradient
# checkpointing recomputes a layer with its arguments, perhaps after other calls have changed EncoderCall.
_TOKENS = "_tokenmerge_tokens"

# The keyword arguments by which a model of transformers collects something of each layer; its configuration
# has the defaults. The model passes them on to its layers.
_HIDDEN_STATES = "output_hidden_states"
_ATTENTIONS = "output_attentions"
_COLLECTED = (_HIDDEN_STATES, _ATTENTIONS)

# Arguments of a layer that ask for what it cannot give where tokens merge, and why not.
_NOT_MERGED = {
    _ATTENTIONS: "attention is between merged tokens, so its weights have no place in the image",
    "is_causal": "a merged token stands for tokens at several places of the sequence, so none of them is "
    "before the others",
}


@dataclasses.dataclass(eq=False)
class EncoderCall:
    """A call of the model that one thread runs."""

    begun: bool = False  # this thread has begun a call since the model was patched
    part: Mark | None = None  # lives while a part of the model is called by itself, from its first layer on
    # Whether it is a method that collects the tokens of its layers, if ``by_keyword`` is False.
    collects: bool = False
    # What the tokens at the input of each layer stand for, if ``by_keyword`` is False.
    tokens_of_layers: list[RecordedTokens | None] | None = None
    r: int = 0  # number of tokens to remove in the running layer, or 0 outside a layer
    tokens: RecordedTokens | None = None  # what the tokens at the input of the running layer stand for
    plan: SizedPlan | None = None  # plan of the running layer, once the keys are known


class EncoderState:
    """State that all layers of a patched model share."""

    def __init__(self, config: ViTConfig, facts: Encoder) -> None:
        self.config = config
        self.facts = facts
        self.r = config.per_layer(len(facts.layers))  # number of tokens to remove in each layer
        # Whether the last layer gives each input token a result.
        self.unmerge = config.unmerge or facts.averages
        # What the tokens after each layer stand for, by path, while :meth:`Patch.record` collects it.
        self.record: dict[str, RecordedTokens] | None = None
        self.running = PerThread(EncoderCall)
        self.uses = Uses()  # the threads that run it


@dataclasses.dataclass(frozen=True, eq=False)
class EncoderLayerState:
    """State of a layer and of its parts."""

    encoder: EncoderState
    index: int  # number of the layer, from 0
    layer: EncoderLayer


def checked_encoders(model: object, config: ViTConfig) -> dict[nn.Module, Encoder]:
    """Find the encoders of a model, and check that they can be patched. Nothing is changed yet."""
    encoders = find_encoders(model)
    if not encoders:
        seen = ", ".join(sorted({type(part).__name__ for part in parts(model)} or {type(model).__name__}))
        names = ", ".join(name for f in FAMILIES for name in (f.model, *f.around, *f.averaging))
        raise UnsupportedModelError(
            f"no vision transformer to merge tokens in: found {seen}; pass a model of one of the classes "
            f"{names} (the last two are timm's), or a ToMeConfig for a diffusion model"
        )
    for root, encoder in encoders.items():
        name = type(root).__name__
        if not encoder.layers:
            raise NothingToMergeError(f"nothing to merge: {name} has no layers; pass a model with layers")
        check_attention(root, config)
        if encoder.family.collector:
            check_swappable(root, name, encoder.family.collector)
        for layer in encoder.layers:
            for path in (layer.path, *(f"{layer.path}.{part}" for part in layer.parts)):
                check_swappable(root.get_submodule(path), path, "forward")
    return encoders


def patch_encoder(root: nn.Module, state: EncoderState) -> None:
    """Patch an encoder from :func:`checked_encoders` that is not patched yet."""
    state.running = PerThread(EncoderCall)
    for index, layer in enumerate(state.facts.layers):
        module = root.get_submodule(layer.path)
        layer_state = EncoderLayerState(state, index, layer)
        swap(module, "forward", layer_call, layer_state)
        swap_parts(module, layer_state)
    if state.facts.family.collector:
        swap(root, state.facts.family.collector, collecting_call, state)
    add_hook(root, begin, state)
    root.register_forward_hook(end, always_call=True)


def check_attention(model: nn.Module, config: ViTConfig) -> None:
    """Check that the attention back-end can do proportional attention, if the settings ask for it."""
    backend = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if config.proportional_attention and backend not in (None, "eager", "sdpa"):
        raise UnsupportedModelError(
            f"proportional_attention adds log(size) to the attention logits, which {backend!r} attention "
            'cannot do; call model.set_attn_implementation("sdpa") or take '
            "ViTConfig(proportional_attention=False)"
        )


def begin(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Start a call in which nothing has merged yet; a hook before the model's forward."""
    if torch.compiler.is_compiling():
        encoder: EncoderState = model.__dict__[STATE]
    else:
        with CHANGES:  # another thread may restore or patch the model until then
            begun: EncoderState | None = model.__dict__.get(STATE)
            if begun is None:
                return None
            mark = Mark()  # lives as long as the call
            sys._getframe(1).f_locals[MARK] = mark
            begun.uses.begin_call(mark)
        encoder = begun
        encoder.running.value.begun = True
    check_attention(model, encoder.config)
    call = HostCall(model.forward, parameters(type(model).forward), args, kwargs)
    _check_mask(encoder, call.argument(encoder.facts.family.mask))
    if not encoder.facts.by_keyword:
        return None  # the first layer starts the call, as when only a part of the model is called
    asked = {}
    for name in _COLLECTED:
        value = getattr(model.config, name, False)
        if value:
            asked[name] = value
    return args, {**asked, **kwargs, _TOKENS: [None] * (len(encoder.r) + 1)}


def end(model: nn.Module, args: tuple, result: Any) -> None:
    """End a call, whether it returned or raised an error; a hook after the model's forward."""
    encoder: EncoderState | None = model.__dict__.get(STATE)
    if encoder is not None and not torch.compiler.is_compiling():
        encoder.uses.end_call(failed=result is None)
        encoder.running.value.tokens_of_layers = None


def layer_call(original: HostMethod) -> Callable:
    """Make the method of the layer: its attention is proportional, its result is merged."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: EncoderLayerState | None = self.__dict__.get(STATE)
        if state is None or _is_in_the_middle(self, state):
            return original.of(self)(*args, **kwargs)
        encoder = state.encoder
        running = encoder.running.value
        given = kwargs.pop(_TOKENS, None)
        tokens_of_layers = _tokens_of_call(state) if given is None else given
        swap_parts(self, state)
        call = HostCall(original.of(self), original.names(), args, kwargs)
        x = call.argument(call.names[0])
        # In a call of the whole model, a mask at this point hides nothing, since it is the host's own.
        if given is None:
            _check_mask(encoder, call.argument(encoder.facts.family.mask))
        if any(encoder.r):
            for name, why in _NOT_MERGED.items():
                if call.argument(name):
                    raise _refused(name, why)
        tokens = tokens_of_layers[state.index]
        collects = running.collects or kwargs.get(_HIDDEN_STATES)
        if tokens is not None:
            if collects:
                x = tokens.remerge(x)
                call = call.replaced(call.names[0], x)
            # To be added to the attention logits [b, heads, n, n].
            weighs = encoder.config.proportional_attention
            log_sizes = tokens.sizes.log().to(x.dtype)[:, None, None, :] if weighs else None
            call = call.replaced(encoder.facts.family.mask, log_sizes)
        running.r = _num_removed(state, x)
        running.tokens = tokens
        try:
            y = call.result()
            if running.plan is not None:
                y = running.plan.merge(_one_tensor(y, state))
                tokens = running.plan.after
        finally:
            running.r = 0
            running.tokens = None
            running.plan = None
            if state.index + 1 == len(encoder.r):
                running.part = None
        tokens_of_layers[state.index + 1] = tokens
        if tokens is not None:
            if encoder.record is not None:
                encoder.record[state.layer.path] = tokens
            if collects or (encoder.unmerge and state.index + 1 == len(encoder.r)):
                y = tokens.unmerge(_one_tensor(y, state))
        return y

    return forward


def _is_in_the_middle(layer: nn.Module, state: EncoderLayerState) -> bool:
    """Return whether another thread has patched or restored the model in the middle of this thread's call."""
    running = state.encoder.running.value
    # Gradient checkpointing repeats calls of layers, perhaps in a thread that has begun none.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    if state.index == 0 and not state.encoder.uses.calls_here:
        with CHANGES:  # all layers are patched, and stay so until the last one has run
            if layer.__dict__.get(STATE) is not state:
                return True
            running.begun = True
            running.part = Mark()
            state.encoder.uses.begin_call(running.part)
    return not running.begun


def keys_call(original: HostMethod) -> Callable:
    """Make the method of the module that returns the keys, from which the plan is made."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        keys = original.of(self)(*args, **kwargs)
        state: EncoderLayerState | None = self.__dict__.get(STATE)
        running = None if state is None else state.encoder.running.value
        if state is not None and running is not None and running.r:
            d = state.layer.head_dim
            by_head = keys if d is None else keys.unflatten(-1, (-1, d)).transpose(1, 2)
            # At least float32: half precision would make different similarities equal.
            metric = by_head.detach().mean(dim=1, dtype=torch.promote_types(keys.dtype, torch.float32))
            protected = state.encoder.facts.protected
            plan = plan_tome_vit(metric, running.r, protected)
            running.plan = plan_by_size(plan, running.tokens, protected)
        return keys

    return forward


def first_call(original: HostMethod) -> Callable:
    """Make the method of the first module of the MLP's branch: the branch runs on merged tokens."""

    def forward(self: nn.Module, x: Tensor) -> Any:
        plan = _running_plan(self)
        return original.of(self)(x if plan is None else plan.merge(x))

    return forward


def last_call(original: HostMethod) -> Callable:
    """Make the method of the last module of the branch, whose result is unmerged for the host's sum."""

    def forward(self: nn.Module, x: Tensor) -> Any:
        plan = _running_plan(self)
        y = original.of(self)(x)
        return y if plan is None else plan.plan.unmerge(y)

    return forward


def _running_plan(part: nn.Module) -> SizedPlan | None:
    """Return the plan of the running layer that a module is a part of."""
    state: EncoderLayerState | None = part.__dict__.get(STATE)
    return None if state is None else state.encoder.running.value.plan


def collecting_call(original: HostMethod) -> Callable:
    """Make the method of the model that collects the tokens of its layers, with a place for each token."""

    def collect(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: EncoderState | None = self.__dict__.get(STATE)
        if state is None:
            return original.of(self)(*args, **kwargs)
        state.running.value.collects = True
        try:
            return original.of(self)(*args, **kwargs)
        finally:
            state.running.value.collects = False

    return collect


def swap_parts(layer: nn.Module, state: EncoderLayerState) -> None:
    """Swap the parts of a layer; swap a part again if other software, such as PEFT, has replaced it."""
    for name, call in zip(state.layer.parts, (keys_call, first_call, last_call), strict=True):
        part = layer.get_submodule(name)
        if part.__dict__.get(STATE) is not state:
            restore(part)  # the former part may be inside the new one
            swap(part, "forward", call, state)


def _tokens_of_call(state: EncoderLayerState) -> list[RecordedTokens | None]:
    """Return what the tokens of a call stand for, for a layer that does not get it as an argument."""
    encoder = state.encoder
    running = encoder.running.value
    if state.index == 0:
        running.tokens_of_layers = [None] * (len(encoder.r) + 1)
    tokens = running.tokens_of_layers
    if tokens is None:
        raise UnsupportedModelError(
            f"{state.layer.path}: called without the layers before it, so the sizes of its tokens are "
            "unknown; switch off the feature that calls it alone, such as gradient checkpointing of timm: "
            "model.set_grad_checkpointing(False)"
        )
    if state.index + 1 == len(encoder.r):
        running.tokens_of_layers = None
    return tokens


def _num_removed(state: EncoderLayerState, x: Tensor) -> int:
    encoder = state.encoder
    protected = encoder.facts.protected
    most = most_removed(x.shape[1], protected)
    if state.index == 0 and most == 0 and any(encoder.r):
        raise NothingToMergeError(
            f"nothing to merge: an input of shape {tuple(x.shape)} has {x.shape[1] - protected} tokens "
            f"besides the {protected} that never merge, and merging needs two; use larger images"
        )
    return min(encoder.r[state.index], most)


def _refused(name: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name}: {why}; call the model without {name}, or remove_token_merging(model) first"
    )


def _check_mask(encoder: EncoderState, mask: Tensor | None) -> None:
    if mask is not None and any(encoder.r):
        why = f"a mask of shape {tuple(mask.shape)} is for all tokens and does not fit merged ones"
        raise _refused(encoder.facts.family.mask, why)


def _one_tensor(y: Any, state: EncoderLayerState) -> Tensor:
    if not isinstance(y, Tensor):
        raise UnsupportedModelError(
            f"{state.layer.path}: expected one tensor as its result, got a {type(y).__name__}, as in old "
            "versions of transformers; install transformers 5.23 or newer"
        )
    return y
