"""The methods of a patched vision transformer.

The paper merges between attention and MLP, in the middle of a layer's forward. Here the MLP and its norm run
on merged tokens, their result is unmerged so that the host can add it, and the result of the layer is merged.
This is the same: the mean of equal tokens is that token, so merge(x + unmerge(mlp(norm(merge(x))))) equals
merge(x) + mlp(norm(merge(x))).

A call may collect the tokens of its layers. Then each layer unmerges its result, so that every token of the
input has its place in what is collected, and takes one of the equal tokens of each group as its own input.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.errors import NothingToMergeError, UnsupportedModelError
from tokenmerge.models.call import HostCall, HostMethod, parameters
from tokenmerge.ops import SizedPlan, Tokens, plan_by_size
from tokenmerge.runtime.memory.state import STATE
from tokenmerge.runtime.patching.patch import restore
from tokenmerge.runtime.patching.swap import swap
from tokenmerge.runtime.steps.pipeline import PerThread
from tokenmerge.vit.config import ViTConfig
from tokenmerge.vit.hosts import Encoder, EncoderLayer
from tokenmerge.vit.planner import most_removed, plan_tome_vit

# The keyword argument that carries the token sizes of a call through its layers: a list with an entry for the
# input of each layer, None where nothing has merged. It is an argument because gradient checkpointing
# recomputes a layer with its arguments, possibly after other calls; EncoderCall would have changed by then.
_TOKENS = "_tokenmerge_tokens"

# The keyword arguments by which a model of transformers collects something of each layer; its configuration
# has the defaults. The model passes them on to its layers.
_COLLECTED = _HIDDEN_STATES, _ATTENTIONS = "output_hidden_states", "output_attentions"


@dataclasses.dataclass(frozen=True)
class RecordedTokens:
    """The input tokens that each token after a layer stands for.

    Attributes:
        source: ``[b, n]`` index 0 … m−1 of the token that stands for each token of the model's input.
        sizes: ``[b, m]`` number of input tokens that each token stands for.
        protected: number of tokens before the patches.
    """

    source: Tensor
    sizes: Tensor
    protected: int

    def unmerge(self, y: Tensor) -> Tensor:
        """Give each token of the model's input the value of its merged token: ``[b, m, c]`` → ``[b, n, c]``.

        ``y`` are the tokens after the layer, as a forward hook on it gets them.

        Raises:
            ValueError: ``y`` has another number of tokens, as in a call that collects them from its layers.
        """
        if y.shape[1] != self.sizes.shape[1]:
            raise ValueError(
                f"y: expected the {self.sizes.shape[1]} tokens after the layer, got {y.shape[1]}; a call "
                "with output_hidden_states, or of forward_intermediates, unmerges them itself"
            )
        return Tokens(self.sizes, self.source).unmerge(y)

    def labels(self, height: int | None = None, width: int | None = None) -> Tensor:
        """Return the groups of merged patches, for :func:`tokenmerge.pictures.draw_groups`.

        They are the index ``[b, height, width]`` of the token that stands for each patch, in a grid of this
        many rows and columns; None: the grid is square.

        Raises:
            ValueError: ``height`` × ``width`` is not the number of patches.
        """
        patches = self.source[:, self.protected :]
        n = patches.shape[1]
        if height is None or width is None:
            height = width = round(n**0.5)
        if height * width != n:
            raise ValueError(
                f"height, width: expected two numbers whose product is the {n} patches, got {height} × "
                f"{width}"
            )
        return patches.reshape(-1, height, width)


@dataclasses.dataclass(eq=False)
class EncoderCall:
    """A call of the model that one thread runs."""

    # Whether it is a method that collects the tokens of its layers, if ``by_keyword`` is False.
    collects: bool = False
    # Token sizes at the input of each layer, if ``by_keyword`` is False.
    sizes: list[Tokens | None] | None = None
    r: int = 0  # number of tokens to remove in the running layer; 0 outside a layer
    tokens: Tokens | None = None  # what the tokens at the input of the running layer stand for
    plan: SizedPlan | None = None  # plan of the running layer, once the keys are known


@dataclasses.dataclass(eq=False)
class EncoderState:
    """State that all layers of a patched model share.

    Raises:
        ConfigError: ``config.r`` is a sequence with another length than the list of layers.
    """

    config: ViTConfig
    facts: Encoder
    # What the tokens after each layer stand for, by path, while :meth:`Patch.record` collects it.
    record: dict[str, RecordedTokens] | None = None
    threads: PerThread[EncoderCall] = dataclasses.field(default_factory=lambda: PerThread(EncoderCall))

    def __post_init__(self) -> None:
        self.r = self.config.per_layer(len(self.facts.layers))  # number of tokens to remove in each layer
        # Whether the last layer gives each input token a result.
        self.unmerge = self.config.unmerge or self.facts.averages

    @property
    def running(self) -> EncoderCall:
        """The running call of this thread."""
        return self.threads.value

    @contextlib.contextmanager
    def recording(self) -> Iterator[dict[str, RecordedTokens]]:
        """Within the context, record what the tokens after each layer stand for, by its path."""
        before, latest = self.record, dict[str, RecordedTokens]()
        self.record = latest
        try:
            yield latest
        finally:
            self.record = before


@dataclasses.dataclass(frozen=True, eq=False)
class EncoderLayerState:
    """State of a layer and of its parts."""

    encoder: EncoderState
    index: int  # number of the layer, from 0
    layer: EncoderLayer


def begin(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Start a call in which nothing has merged yet; a hook before the model's forward."""
    encoder: EncoderState = model.__dict__[STATE]
    check_attention(model, encoder.config)
    call = HostCall(model.forward, parameters(type(model).forward), args, kwargs)
    mask = call.argument(encoder.facts.family.mask)
    if mask is not None and any(encoder.r):
        raise _mask_error(encoder, mask)
    if not encoder.facts.by_keyword:
        return None  # the first layer starts the call, as when only a part of the model is called
    asked = {name: value for name in _COLLECTED if (value := getattr(model.config, name, False))}
    return args, {**asked, **kwargs, _TOKENS: [None] * (len(encoder.r) + 1)}


def check_attention(model: nn.Module, config: ViTConfig) -> None:
    """Check that the attention back-end can do proportional attention, if the settings ask for it.

    Raises:
        UnsupportedModelError: it cannot add to the logits.
    """
    backend = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if config.proportional_attention and backend not in (None, "eager", "sdpa"):
        raise UnsupportedModelError(
            f"proportional_attention adds log(size) to the attention logits, which {backend!r} attention "
            'cannot do; call model.set_attn_implementation("sdpa") or take '
            "ViTConfig(proportional_attention=False)"
        )


# These functions make the method of a swapped class from the original one, as in runtime.blocks.forward.


def layer_call(original: HostMethod) -> Callable:
    """Make the method of the layer: its attention is proportional, its result is merged."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: EncoderLayerState | None = self.__dict__.get(STATE)
        if state is None:
            return original.of(self)(*args, **kwargs)
        encoder, given = state.encoder, kwargs.pop(_TOKENS, None)
        running = encoder.running
        tokens_of_layers = _tokens_of_call(state) if given is None else given
        swap_parts(self, state)
        call = HostCall(original.of(self), original.names(), args, kwargs)
        x, mask = call.argument(call.names[0]), call.argument(encoder.facts.family.mask)
        if any(encoder.r):
            # In a call of the whole model, a mask at this point is the host's own, which hides nothing.
            if mask is not None and given is None:
                raise _mask_error(encoder, mask)
            _check_what_is_asked(call)
        tokens, collects = tokens_of_layers[state.index], running.collects or kwargs.get(_HIDDEN_STATES)
        if tokens is not None:
            if collects:
                x = tokens.remerge(x)
                call = call.replaced(call.names[0], x)
            call = call.replaced(encoder.facts.family.mask, _log_sizes(tokens, encoder, x.dtype))
        running.r, running.tokens = _num_removed(state, x), tokens
        try:
            y = call.result()
            if running.plan is not None:
                y, tokens = running.plan.merge(_one_tensor(y, state)), running.plan.after
        finally:
            running.r, running.tokens, running.plan = 0, None, None
        tokens_of_layers[state.index + 1] = tokens
        if tokens is not None:
            if encoder.record is not None:
                protected = encoder.facts.protected
                encoder.record[state.layer.path] = RecordedTokens(tokens.source, tokens.sizes, protected)
            if collects or (encoder.unmerge and state.index + 1 == len(encoder.r)):
                y = tokens.unmerge(_one_tensor(y, state))
        return y

    return forward


def keys_call(original: HostMethod) -> Callable:
    """Make the method of the module that returns the keys, from which the plan is made."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        keys = original.of(self)(*args, **kwargs)
        state: EncoderLayerState | None = self.__dict__.get(STATE)
        if state is not None and (running := state.encoder.running).r:
            d = state.layer.head_dim
            by_head = keys if d is None else keys.unflatten(-1, (-1, d)).transpose(1, 2)
            # At least float32: half precision would make different similarities equal.
            metric = by_head.detach().mean(dim=1, dtype=torch.promote_types(keys.dtype, torch.float32))
            plan = plan_tome_vit(metric, running.r, state.encoder.facts.protected)
            running.plan = plan_by_size(plan, running.tokens)
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
        plan, y = _running_plan(self), original.of(self)(x)
        return y if plan is None else plan.unmerge(y)

    return forward


def _running_plan(part: nn.Module) -> SizedPlan | None:
    """Return the plan of the running layer that a module is a part of."""
    state: EncoderLayerState | None = part.__dict__.get(STATE)
    return None if state is None else state.encoder.running.plan


def collecting_call(original: HostMethod) -> Callable:
    """Make the method of the model that collects the tokens of its layers, with a place for each token."""

    def collect(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: EncoderState | None = self.__dict__.get(STATE)
        if state is None:
            return original.of(self)(*args, **kwargs)
        state.running.collects = True
        try:
            return original.of(self)(*args, **kwargs)
        finally:
            state.running.collects = False

    return collect


def swap_parts(layer: nn.Module, state: EncoderLayerState) -> None:
    """Swap the parts of a layer; swap a part again if other software, such as PEFT, has replaced it."""
    for name, call in zip(state.layer.parts, (keys_call, first_call, last_call), strict=True):
        part = layer.get_submodule(name)
        if part.__dict__.get(STATE) is not state:
            restore(part)  # the former part may be inside the new one
            swap(part, "forward", call, state)


def _tokens_of_call(state: EncoderLayerState) -> list[Tokens | None]:
    """Return the token sizes of the running call, for a layer that does not get them as an argument."""
    encoder, running = state.encoder, state.encoder.running
    if state.index == 0:
        running.sizes = [None] * (len(encoder.r) + 1)
    if running.sizes is None:
        raise UnsupportedModelError(
            f"{state.layer.path}: called without the layers before it, so the sizes of its tokens are "
            "unknown; switch off the feature that calls it alone, such as gradient checkpointing of timm: "
            "model.set_grad_checkpointing(False)"
        )
    sizes = running.sizes
    if state.index + 1 == len(encoder.r):
        running.sizes = None
    return sizes


def _num_removed(state: EncoderLayerState, x: Tensor) -> int:
    encoder, protected = state.encoder, state.encoder.facts.protected
    most = most_removed(x.shape[1], protected)
    if state.index == 0 and most == 0 and any(encoder.r):
        raise NothingToMergeError(
            f"nothing to merge: an input of shape {tuple(x.shape)} has {x.shape[1] - protected} "
            f"tokens besides the {protected} that never merge, and merging needs two; use larger "
            "pictures"
        )
    return min(encoder.r[state.index], most)


def _log_sizes(tokens: Tokens, encoder: EncoderState, dtype: torch.dtype) -> Tensor | None:
    """log(size) ``[b, 1, 1, n]``, to be added to the attention logits ``[b, heads, n, n]``."""
    return tokens.sizes.log().to(dtype)[:, None, None, :] if encoder.config.proportional_attention else None


def _mask_error(encoder: EncoderState, mask: Tensor) -> UnsupportedModelError:
    name = encoder.facts.family.mask
    return UnsupportedModelError(
        f"{name}: a mask of shape {tuple(mask.shape)} is for all tokens and does not fit merged ones; call "
        f"the model without {name}, or remove_token_merging(model) first"
    )


def _check_what_is_asked(call: HostCall) -> None:
    """Refuse what a layer cannot give where tokens merge."""
    if call.argument(_ATTENTIONS):
        raise UnsupportedModelError(
            f"{_ATTENTIONS}: attention is between merged tokens, so its weights have no place in the "
            f"picture; call the model without {_ATTENTIONS}, or remove_token_merging(model) first"
        )
    if call.argument("is_causal"):
        raise UnsupportedModelError(
            "is_causal: a merged token stands for tokens at several places of the sequence, so none of them "
            "is before the others; call the model without is_causal, or remove_token_merging(model) first"
        )


def _one_tensor(y: Any, state: EncoderLayerState) -> Tensor:
    if not isinstance(y, Tensor):
        raise UnsupportedModelError(
            f"{state.layer.path}: expected one tensor as its result, got a {type(y).__name__}, as in old "
            "versions of transformers; install transformers 5.23 or newer"
        )
    return y
