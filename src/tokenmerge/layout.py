"""How a module takes its tokens: on which grid, where in its arguments, and what else changes with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tokenmerge.ops import Plan, merge, unmerge

__all__ = [
    "PLAIN",
    "Follower",
    "Grid",
    "Layout",
    "add_lost",
    "argument",
    "call_on",
    "given",
    "keyed_call",
    "merged_call",
    "merged_tokens",
    "unmerged_result",
]


@dataclasses.dataclass(eq=False)
class Grid:
    """The token grid of the running call, left by the module whose input shows it."""

    frames: int = 0
    rows: int = 0
    columns: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """(frames, rows, columns)."""
        return self.frames, self.rows, self.columns


@dataclasses.dataclass(frozen=True)
class Follower:
    """An argument that has an entry for each token: a position table, a mask.

    A merged token keeps the entry of the token whose place it takes.

    Attributes:
        name: of the argument; None and missing arguments are left alone.
        axes: of the tokens; one of length 1, which the host broadcasts, is left alone.
        batched: whether the first axis is that of the batch (of length 1: the same for all). Where it is
            not, all images of a batch have to share a plan.
        element: where the argument is a tuple, which of its parts; None: all of them.
        ndim: it follows only where it has so many axes; None: any number.
        expand: whether the host leaves out a first axis of the batch that its layer takes. The axes of the
            tokens count with it.
    """

    name: str
    axes: tuple[int, ...]
    batched: bool = False
    element: int | None = None
    ndim: int | None = None
    expand: bool = False


@dataclasses.dataclass(frozen=True)
class Layout:
    """The call of a block or of one of its layers, one of whose arguments are tokens ``[b, n, c]``.

    Attributes:
        tokens: of a block, the name of that argument; None: the first, as for every layer.
        text: where text tokens stand that are in one sequence with the image's, if there are any: in the
            tokens themselves or in a follower. They never merge.
        padding: of a block in which images have texts of different length, each followed by its image and
            then by padding: name of a mask ``[b, text + n]`` that is true up to the padding.
        followers: arguments with an entry for each token.
        again: name of an argument that may be the same tensor as the tokens.
        outputs: where the result is a tuple, which of its tensors are image tokens.
        whole: names of arguments laid out for the whole grid: while one is given, the call stays dense.
    """

    tokens: str | None = None
    text: Literal["first", "last"] = "first"
    padding: str | None = None
    followers: tuple[Follower, ...] = ()
    again: str | None = None
    outputs: tuple[int, ...] = (0,)
    whole: tuple[str, ...] = ()

    @property
    def batched(self) -> bool:
        """Whether each image of a batch can have a plan of its own."""
        return all(follower.batched for follower in self.followers)

    def image(self, x: Tensor, n: int, start: Tensor | None = None) -> Tensor:
        """The n image tokens of a sequence; ``start`` ``[b]``: where they begin, if images differ in it."""
        if start is not None:
            places = start.unsqueeze(1) + torch.arange(n, device=x.device)
            return x.take_along_dim(places.unsqueeze(-1), dim=1)
        return x[:, x.shape[1] - n :] if self.text == "first" else x[:, :n]


PLAIN = Layout()  # image tokens alone, and no argument that follows them


def merged_call(
    function: Callable,
    layout: Layout,
    plan: Plan,
    names: Sequence[str],
    args: tuple,
    kwargs: dict[str, Any],
    combine: Callable[[Plan, Tensor], Tensor] = merge,
    change_only: bool = False,
) -> Any:
    """Call a function with merged tokens and unmerge its result.

    Args:
        function: what takes the arguments.
        layout: where its tokens are.
        plan: for the image tokens.
        names: of its parameters, in order.
        args: positional arguments, for all n tokens.
        kwargs: arguments by name.
        combine: (plan, tokens) → merged tokens.
        change_only: give each token the change that the function made to the merged token that holds it,
            and not that token's result.
    """
    tokens = argument(layout.tokens or names[0], names, args, kwargs)
    merged = merged_tokens(layout, plan, tokens, combine)
    result = call_on(function, layout, plan, names, args, kwargs, merged)
    return unmerged_result(layout, plan, result, (tokens, merged) if change_only else None)


def merged_tokens(
    layout: Layout, plan: Plan, tokens: Tensor, combine: Callable[[Plan, Tensor], Tensor]
) -> Tensor:
    """The first part of :func:`merged_call`: tokens of which those of the image are merged."""
    return _replace_image(layout, tokens, plan.inverse.shape[1], lambda image: combine(plan, image))


def call_on(
    function: Callable,
    layout: Layout,
    plan: Plan,
    names: Sequence[str],
    args: tuple,
    kwargs: dict[str, Any],
    merged: Tensor,
) -> Any:
    """The second part: call a function on merged tokens, with what follows them."""
    name = layout.tokens or names[0]
    changed = {name: merged}
    tokens = argument(name, names, args, kwargs)
    if layout.again and argument(layout.again, names, args, kwargs) is tokens:
        changed[layout.again] = merged
    return _call(function, layout, plan, names, args, kwargs, changed)


def unmerged_result(layout: Layout, plan: Plan, result: Any, change: tuple[Tensor, Tensor] | None) -> Any:
    """The last part: the result, a tensor or several, for all tokens.

    Args:
        layout: where the tokens are.
        plan: that they were merged by.
        result: for merged tokens.
        change: all tokens and merged ones, of which the former get the change from the latter to the result;
            None: they get the result.
    """
    n, m = plan.inverse.shape[1], plan.keep.shape[1]

    def back(image: Tensor) -> Tensor:
        if change is None:
            return unmerge(plan, image)
        tokens, merged = change
        return layout.image(tokens, n) + unmerge(plan, image - layout.image(merged, m))

    if isinstance(result, Tensor):
        return _replace_image(layout, result, m, back)
    return tuple(
        _replace_image(layout, value, m, back) if i in layout.outputs and value is not None else value
        for i, value in enumerate(result)
    )


def add_lost(
    layout: Layout,
    plan: Plan,
    result: Any,
    changes: Sequence[Tensor | None],
    combine: Callable[[Plan, Tensor], Tensor] = merge,
) -> Any:
    """Add to a merged result what merging loses: of each token's change, how it differs from its group's.

    Args:
        layout: where the tokens are.
        plan: that the result was merged by.
        result: of :func:`merged_call`.
        changes: that the function made on a step that was not merged, one for each tensor of the result.
        combine: as there.
    """
    n = plan.inverse.shape[1]

    def add(value: Tensor, change: Tensor) -> Tensor:
        image = layout.image(change, n)
        lost = image - unmerge(plan, combine(plan, image))
        return _replace_image(layout, value, n, lambda tokens: tokens + lost)

    alone = isinstance(result, Tensor)
    added = tuple(
        value if change is None or not (alone or i in layout.outputs) else add(value, change)
        for i, (value, change) in enumerate(zip([result] if alone else result, changes, strict=True))
    )
    return added[0] if alone else added


def keyed_call(
    function: Callable,
    layout: Layout,
    plan: Plan,
    keys: str,
    names: Sequence[str],
    args: tuple,
    kwargs: dict[str, Any],
    combine: Callable[[Plan, Tensor], Tensor],
) -> Any:
    """Call self-attention with merged tokens to look at, by the argument ``keys``; all tokens look.

    The other arguments are those of :func:`merged_call`.
    """
    tokens = argument(layout.tokens or names[0], names, args, kwargs)
    return _call(function, layout, plan, names, args, {**kwargs, keys: None}, {keys: combine(plan, tokens)})


def _call(
    function: Callable,
    layout: Layout,
    plan: Plan,
    names: Sequence[str],
    args: tuple,
    kwargs: dict[str, Any],
    changed: dict[str, Tensor],
) -> Any:
    """Call a function with some arguments changed, and those that follow the tokens."""
    follow = {follower.name: follower for follower in layout.followers}

    def now(name: str, value: Any) -> Any:
        if name in changed:
            return changed[name]
        return _follow(value, follow[name], layout, plan) if name in follow else value

    return function(
        *(now(name, value) for name, value in zip(names, args, strict=False)),
        *args[len(names) :],
        **{name: now(name, value) for name, value in kwargs.items()},
    )


def given(wanted: Sequence[str], names: Sequence[str], args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call has one of the arguments ``wanted``, also within a dictionary of arguments."""
    within = [value for value in (*args, *kwargs.values()) if isinstance(value, dict)]
    return any(
        argument(name, names, args, kwargs) is not None or any(more.get(name) is not None for more in within)
        for name in wanted
    )


def argument(name: str, names: Sequence[str], args: tuple, kwargs: dict[str, Any]) -> Any:
    """The argument called ``name`` of a call, however it was passed; None where it was not."""
    if name in kwargs:
        return kwargs[name]
    place = names.index(name) if name in names else len(args)
    return args[place] if place < len(args) else None


def _replace_image(layout: Layout, x: Tensor, n: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change the n image tokens of a sequence and leave its text as it is."""
    text = x.shape[1] - n
    if text == 0:
        return change(x)
    if layout.text == "first":
        return torch.cat([x[:, :text], change(x[:, text:])], dim=1)
    return torch.cat([change(x[:, :n]), x[:, n:]], dim=1)


def _follow(value: Any, follower: Follower, layout: Layout, plan: Plan) -> Any:
    """The entries of an argument that stay when tokens merge, in the order of the merged tokens."""
    if follower.element is None or value is None:
        return _followed(value, follower, layout, plan)
    return type(value)(
        _followed(part, follower, layout, plan) if i == follower.element else part
        for i, part in enumerate(value)
    )


def _followed(value: Any, follower: Follower, layout: Layout, plan: Plan) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_followed(part, follower, layout, plan) for part in value)
    if value is None or follower.ndim not in (None, value.ndim):
        return value
    b, n = plan.inverse.shape
    if follower.expand:
        value = value.unsqueeze(0)
    if follower.batched and value.shape[0] == 1:
        value = value.expand(b, *value.shape[1:])
    for axis in follower.axes:
        if value.shape[axis] > 1:
            index = _entries(plan, value.shape[axis] - n, layout)
            if follower.batched:
                along, shape = [1] * value.ndim, list(value.shape)
                along[0], along[axis] = index.shape
                shape[axis] = index.shape[1]
                value = value.gather(axis, index.view(along).expand(shape))
            else:
                value = value.index_select(axis, index[0])
    return value


def _entries(plan: Plan, text: int, layout: Layout) -> Tensor:
    """``[b, text + m]``: which entries stay where those of ``text`` text tokens stand beside the image's."""
    kept = plan.kept()
    if text == 0:
        return kept
    b, n = plan.inverse.shape
    beside = torch.arange(text, device=kept.device).expand(b, -1)
    return torch.cat([beside, kept + text] if layout.text == "first" else [kept, beside + n], dim=1)
