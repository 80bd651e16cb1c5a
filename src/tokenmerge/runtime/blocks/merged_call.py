"""Calls of a host's method with merged tokens: merge, call, unmerge."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import Layout, TokenArgument
from tokenmerge.models.call import HostCall
from tokenmerge.ops.once import first_numbers, once
from tokenmerge.ops.plan import MergePlan, Plan, keep_destinations
from tokenmerge.runtime.memory.caches import Tensors
from tokenmerge.runtime.memory.state import LayerState


class OfImages(NamedTuple):
    """What takes the place of a token argument without a batch axis: its value for each image."""

    values: tuple[Tensor, ...]


def combined(plan: Plan, x: Tensor, combine: str) -> Tensor:
    """Return the merged tokens ``[b, m, c]`` of tokens ``[b, n, c]``, combined as the settings say."""
    return plan.merge(x) if combine == "mean" else keep_destinations(plan, x)


def merged_tokens(layout: Layout, plan: Plan, tokens: Tensor, combine: str) -> Tensor:
    """Return a sequence of tokens with its image merged; its text stays as it is."""
    n = plan.inverse.shape[1]
    whole = _with_text(layout, plan, tokens.shape[1] - n)
    if whole is None:
        return image_replaced(layout, tokens, n, lambda image: combined(plan, image, combine))
    return combined(whole, tokens, combine)


def with_merged_tokens(
    call: HostCall, layout: Layout, plan: Plan, merged: Tensor, combine: str, images: int = 1
) -> HostCall:
    """Return a call with merged tokens, and with what belongs to them in its other arguments.

    Where ``images`` have plans of their own, arguments without a batch axis are made for each of them.
    """
    name = layout.tokens or call.names[0]
    now = _following(call, layout, plan, combine, images).replaced(name, merged)
    if layout.same_as_tokens and call.argument(layout.same_as_tokens) is call.argument(name):
        now = now.replaced(layout.same_as_tokens, merged)
    return now


def merged_call(
    call: HostCall, layout: Layout, plan: Plan, combine: str, images: int = 1, change_only: bool = False
) -> Any:
    """Return the result of a call with merged tokens, unmerged.

    The ``images`` are those of :func:`with_merged_tokens`. With ``change_only``, each token gets only what
    the call added to the merged token that holds it. Further entries of a token have nothing to be added to,
    and are those of the merged token.
    """
    tokens = layout.tokens_of(call)
    n = plan.inverse.shape[1]
    m = plan.keep.shape[1]
    whole = _with_text(layout, plan, tokens.shape[1] - n)
    if whole is None:
        merged = image_replaced(layout, tokens, n, lambda image: combined(plan, image, combine))
    else:
        merged = combined(whole, tokens, combine)
    now = with_merged_tokens(call, layout, plan, merged, combine, images)
    # A block hands its arguments on to its attention, which is then called for each image.
    result = now.result() if images == 1 or change_only else result_by_image(now, len(merged))

    def add_change(image: Tensor) -> Tensor:
        return layout.image(tokens, n) + plan.unmerge(image - layout.image(merged, m))

    def back(value: Tensor, adds_change: bool) -> Tensor:
        if whole is not None and not adds_change and value.shape[1] == merged.shape[1]:
            return whole.unmerge(value)
        return image_replaced(layout, value, m, add_change if adds_change else plan.unmerge)

    if isinstance(result, Tensor):
        return back(result, change_only)
    return tuple(
        back(value, change_only and i == layout.outputs[0])
        if i in layout.outputs and value is not None
        else value
        for i, value in enumerate(result)
    )


def with_change(
    layout: Layout,
    plan: Plan,
    start: Tensor,
    start_merged: Tensor,
    value: Tensor,
    combine: str,
    correction: Tensor | None = None,
) -> Tensor:
    """Return the tokens ``start``, with what blocks changed of their merged tokens to get ``value``.

    A ``correction`` R ``[b, n, c]`` is what they added to the image in the step before. It gives back
    R − U M R, which merging loses. M merges and U unmerges.
    """
    n = plan.inverse.shape[1]
    m = plan.keep.shape[1]
    image = layout.image(start, n)
    if correction is None:
        base = image
        merged = layout.image(start_merged, m)
    else:
        # y = x + U (z − M x) + R − U M R, with one merge: that of x + R.
        base = image + correction
        merged = combined(plan, base, combine)
    return image_replaced(layout, value, m, lambda made: base + plan.unmerge(made - merged))


def keyed_call(attention: nn.Module, call: HostCall, state: LayerState, plan: Plan, combine: str) -> Any:
    """Return the result of self-attention in which all tokens attend to merged keys and values."""
    if getattr(attention, "fused_projections", False):
        raise UnsupportedModelError(
            f"{state.path}: scope='keys' needs keys and values projected apart from the queries, and "
            "they are fused; call unfuse_qkv_projections(), or take scope='layers'"
        )
    layout = state.layer.layout
    keys = state.layer.keys
    assert keys is not None
    merged = combined(plan, layout.tokens_of(call), combine)
    return _following(call, layout, plan, combine).replaced(keys, merged).result()


def result_by_image(call: HostCall, images: int) -> Any:
    """Return the result of a call that is made for one image after the other.

    Images have arguments of their own where there is an :class:`OfImages`, and in every tensor whose first
    axis has ``images`` entries. The images follow one another, over and over.
    """
    results = []
    for image in range(images):
        args = tuple([_of_image(value, image, images) for value in call.args])
        kwargs = {name: _of_image(value, image, images) for name, value in call.kwargs.items()}
        # Not _replace: older versions of torch.compile cannot trace it.
        results.append(HostCall(call.function, call.names, args, kwargs).result())
    return _joined(results)


def _of_image(value: Any, image: int, images: int) -> Any:
    """Return what belongs to one image of a batch."""
    if isinstance(value, OfImages):
        return value.values[image % len(value.values)]
    if isinstance(value, Tensor):
        return value[image : image + 1] if value.ndim and len(value) == images else value
    if type(value) not in (tuple, list, dict):
        return value
    parts = list(value.values()) if isinstance(value, dict) else value
    # What stands beside such an argument, such as the positions of the text, has no batch axis either.
    if OfImages in [type(part) for part in parts]:
        parts_of_image = [
            _of_image(part, image, images) if isinstance(part, OfImages) else part for part in parts
        ]
    else:
        parts_of_image = [_of_image(part, image, images) for part in parts]
    if isinstance(value, dict):
        return dict(zip(value, parts_of_image, strict=True))
    return type(value)(parts_of_image)


def _joined(results: list[Any]) -> Any:
    """Return the results for single images as that for their batch."""
    if isinstance(results[0], tuple):
        return tuple([_joined(list(parts)) for parts in zip(*results, strict=True)])
    return torch.cat(results) if isinstance(results[0], Tensor) else results[0]


def _with_text(layout: Layout, plan: Plan, text: int) -> MergePlan | None:
    """Return the plan for a sequence that ``text`` tokens precede, which merge with none.

    None: there is no text before the tokens, or a graph would make the plan for each block.
    """
    if text == 0 or layout.text == "last" or not isinstance(plan, MergePlan) or torch.compiler.is_compiling():
        return None
    return once(plan.inverse, ("text", text), partial(plan.after, text), plan.sizes)


def add_lost(layout: Layout, plan: Plan, result: Any, residuals: Tensors, combine: str) -> Any:
    """Add back the detail lost by merging: how the residual of a token differs from that of its group.

    ``residuals`` are those of the image in a step without merging, one for each tensor of the result.
    """
    n = plan.inverse.shape[1]

    def add(value: Tensor, residual: Tensor) -> Tensor:
        image = layout.image(residual, n).flatten(2)
        lost = image - plan.unmerge(combined(plan, image, combine))
        return image_replaced(layout, value, n, lambda tokens: tokens + lost)

    if isinstance(result, Tensor):
        return add(result, residuals[0])
    pairs = zip(result, residuals, strict=True)
    return tuple(value if residual is None else add(value, residual) for value, residual in pairs)


def added_to_image(layout: Layout, result: Any, base: Tensor | float, n: int) -> Tensors:
    """Return how each tensor of a result differs from ``base`` in the n tokens of the image.

    Further entries of a token have no base. None stands for a tensor without tokens of the image: merging
    loses nothing of the text.
    """
    before = base if isinstance(base, float) else layout.image(base, n)
    if isinstance(result, Tensor):
        return (layout.image(result, n) - before,)
    return tuple(
        layout.image(value, n) - (before if i == layout.outputs[0] else 0.0)
        if i in layout.outputs and value is not None
        else None
        for i, value in enumerate(result)
    )


def _following(call: HostCall, layout: Layout, plan: Plan, combine: str, images: int = 1) -> HostCall:
    """Return the call with the arguments that have an entry for each token cut down to the merged tokens."""
    for argument in layout.token_arguments:
        value = call.argument(argument.name)
        element = argument.element
        if value is None:
            continue
        follow: Callable[..., Any]
        if argument.combined:
            follow = partial(_combined_entries, layout=layout, plan=plan, combine=combine)
        else:
            follow = partial(_followed, argument=argument, layout=layout, plan=plan, images=images)
        if element is None:
            now = follow(value)
        elif isinstance(value, dict):
            now = {key: follow(part) if key == element else part for key, part in value.items()}
        else:
            now = type(value)(follow(part) if i == element else part for i, part in enumerate(value))
        call = call.replaced(argument.name, now)
    return call


def _combined_entries(value: Tensor, layout: Layout, plan: Plan, combine: str) -> Tensor:
    """Return the merged entries of an argument that a block adds to its tokens, or joins with them."""
    b, n = plan.inverse.shape
    return image_replaced(layout, value.expand(b, -1, -1), n, lambda image: combined(plan, image, combine))


def _followed(value: Any, argument: TokenArgument, layout: Layout, plan: Plan, images: int) -> Any:
    """Return the entries of an argument for the merged tokens, in their order."""
    if isinstance(value, (tuple, list)):
        return type(value)([_followed(part, argument, layout, plan, images) for part in value])
    if value is None or argument.ndim not in (None, value.ndim):
        return value
    if argument.alike:
        return _fewer_entries(value, argument, layout, plan)
    # In a graph each block has its own; others may change unseen, or each result has its gradient.
    changes = torch.compiler.is_compiling() or value.is_inference() or value.requires_grad
    made = []
    for image in range(1 if argument.batched else images):
        follow = partial(_at_kept_tokens, value, argument, layout, plan, image)
        if changes:
            made.append(follow())
        else:  # hosts give all blocks the same tensor
            # By identity, since a hash of all that they hold takes longer than the rest. The model keeps
            # both.
            made.append(once(plan.keep, (id(value), id(argument), id(layout), image), follow, value))
    return made[0] if len(made) == 1 else OfImages(tuple(made))


def _fewer_entries(value: Tensor, argument: TokenArgument, layout: Layout, plan: Plan) -> Tensor:
    """Return as many entries as there are merged tokens and text, where those of the image are alike."""
    fewer = plan.inverse.shape[1] - plan.keep.shape[1]
    for axis in argument.axes:
        start = fewer if layout.text == "last" else 0
        value = value.narrow(axis, start, value.shape[axis] - fewer)
    return value


def _at_kept_tokens(value: Tensor, argument: TokenArgument, layout: Layout, plan: Plan, image: int) -> Tensor:
    """Return the entries of the tokens whose place the merged tokens take, beside those of the text.

    Where the argument has no batch axis, they are those of one image.
    """
    b, n = plan.inverse.shape
    if argument.broadcasts_to is not None:
        value = value[(None,) * (argument.broadcasts_to - value.ndim)]
    if argument.batched and value.shape[0] == 1:
        value = value.expand(b, *value.shape[1:])
    for axis in argument.axes:
        if value.shape[axis] <= 1:
            continue
        text = value.shape[axis] - n
        if text < 0:
            name = argument.element if isinstance(argument.element, str) else argument.name
            raise UnsupportedModelError(
                f"{name}: expected an entry for each of the {n} tokens of the image, got {value.shape[axis]} "
                f"in a tensor of shape {tuple(value.shape)}; pass it for all tokens of text and image, or "
                "call remove_token_merging(model) first"
            )
        index = once(plan.keep, ("entries", text, layout.text), partial(_entries, plan, text, layout))
        if argument.batched:
            along = [1] * value.ndim
            shape = list(value.shape)
            along[0], along[axis] = index.shape
            shape[axis] = index.shape[1]
            value = value.gather(axis, index.view(along).expand(shape))
        else:
            value = value.index_select(axis, index[image])
    return value


def _entries(plan: Plan, text: int, layout: Layout) -> Tensor:
    """``[b, text + m]``: the entries that stay, where ``text`` text tokens stand beside the image."""
    kept = plan.kept()
    if text == 0:
        return kept
    b, n = plan.inverse.shape
    beside = first_numbers(text, kept.device).expand(b, -1)
    return torch.cat([beside, kept + text] if layout.text == "first" else [kept, beside + n], dim=1)


def image_replaced(layout: Layout, x: Tensor, n: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a sequence whose n image tokens are changed, and whose text stays as it is."""
    if x.ndim > 3:  # attention that does not join its heads
        return image_replaced(layout, x.flatten(2), n, change).unflatten(2, x.shape[2:])
    text = x.shape[1] - n
    if text == 0:
        return change(x)
    if layout.text == "first":
        return torch.cat([x[:, :text], change(x[:, text:])], dim=1)
    return torch.cat([change(x[:, :n]), x[:, n:]], dim=1)
