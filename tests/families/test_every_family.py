"""What must hold for every family of models, on tiny random models of the real classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import tokenmerge.runtime
from families.tiny import FAMILIES, Family, seeded
from tokenmerge import ToMeConfig, apply_token_merging, remove_token_merging
from tokenmerge.models import find_hosts
from tokenmerge.ops import Plan, make_plan

EVERY = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


def call(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    """The model's result as one tensor."""
    with torch.no_grad():
        result = model(**arguments)
    first = result[0]
    return torch.stack(list(first)) if isinstance(first, list | tuple) else first


def settings(family: Family, **changes: Any) -> ToMeConfig:
    return ToMeConfig(**{"ratio": 0.5, **family.merge, **changes})


def model_of(family: Family) -> nn.Module:
    torch.manual_seed(0)
    return seeded(family.build())


def state(model: nn.Module) -> dict[str, Any]:
    """Type, attributes and hooks of every module."""
    return {
        name: (type(m), {k: v for k, v in m.__dict__.items() if not k.startswith("_forward")}.keys(),
               len(m._forward_pre_hooks), len(m._forward_hooks), len(m._forward_pre_hooks_with_kwargs))
        for name, m in model.named_modules()
    }  # fmt: skip


@EVERY
def test_ratio_0_is_bit_equal(family):
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    dense = call(model, arguments)
    apply_token_merging(model, settings(family, ratio=0, merge_crossattn=True, merge_mlp=True))
    assert torch.equal(call(model, arguments), dense)


def reordering(features: Tensor, grid: Any, config: Any, step: Tensor) -> Plan:
    """A plan that removes nothing and puts the tokens of each image into another order."""
    b, n, _ = features.shape
    orders = [torch.randperm(n - 1, generator=torch.Generator().manual_seed(i)) for i in range(b)]
    return make_plan(
        torch.arange(n - 1), torch.tensor([n - 1]), torch.stack(orders), torch.zeros(b, n - 1).long(), 0
    )


@EVERY
@pytest.mark.parametrize("grid", [(8, 8), (7, 5)])
def test_reordering_tokens_changes_nothing(family, grid, monkeypatch):
    """Each token must keep its own position, mask and condition, so all that differs is the order of sums."""
    model, arguments = model_of(family), family.inputs(2, *grid)
    dense = call(model, arguments)
    monkeypatch.setattr(tokenmerge.runtime, "plan_tome", reordering)
    apply_token_merging(model, settings(family, merge_crossattn=True, merge_mlp=True))
    reordered = call(model, arguments)
    assert_close(reordered, dense, rtol=1e-5, atol=1e-5 * dense.abs().max().item())


@EVERY
def test_half_of_the_tokens_never_reach_the_attention(family):
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    lengths: dict[str, list[int]] = {}
    host = find_hosts(model)[0]

    def watch(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
            lengths.setdefault(name, []).append(args[0].shape[1])

        return hook

    # The query projection lies inside of the patched layer.
    for block in host.blocks:
        for layer in block.layers:
            attention = getattr(block.module, layer.name)
            if layer.kind == "attn1":
                for name in ("to_q", "to_qkv", "to_qkv_mlp_proj", "to_added_qkv"):
                    if isinstance(projection := getattr(attention, name, None), nn.Module):
                        projection.register_forward_hook(
                            watch(f"{block.path}.{layer.name}"), with_kwargs=True
                        )
    dense = call(model, arguments)
    before = {name: list(values) for name, values in lengths.items()}
    lengths.clear()
    apply_token_merging(model, settings(family))
    merged = call(model, arguments)

    assert torch.isfinite(merged).all()
    assert not torch.equal(merged, dense)
    assert lengths
    assert lengths.keys() == before.keys()
    fewer = [name for name in lengths if all(a < b for a, b in zip(lengths[name], before[name], strict=True))]
    within = {b.path for b in host.blocks if b.level <= settings(family).max_downsample}
    assert {name.rpartition(".")[0] for name in fewer} == within


@EVERY
def test_removal_leaves_no_trace(family):
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    before, dense = state(model), call(model, arguments)
    apply_token_merging(model, settings(family, merge_crossattn=True, merge_mlp=True)).remove()
    assert state(model) == before
    assert torch.equal(call(model, arguments), dense)


class Interrupted(Exception):
    pass


@EVERY
def test_removal_after_an_exception_in_the_middle_of_a_step(family):
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    before, dense = state(model), call(model, arguments)
    last = find_hosts(model)[0].blocks[-1].module
    apply_token_merging(model, settings(family))
    attention = getattr(last, find_hosts(model)[0].blocks[-1].layers[0].name)

    def interrupt(*_: object) -> None:
        raise Interrupted

    hook = attention.register_forward_hook(interrupt)
    with pytest.raises(Interrupted):
        call(model, arguments)
    hook.remove()
    remove_token_merging(model)
    assert state(model) == before
    assert torch.equal(call(model, arguments), dense)


@EVERY
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("grid", [(7, 9), (4, 10)])
def test_odd_and_oblong_sizes_and_any_batch(family, grid, batch):
    model, arguments = model_of(family), family.inputs(batch, *grid)
    dense = call(model, arguments)
    apply_token_merging(model, settings(family))
    merged = call(model, arguments)
    assert merged.shape == dense.shape
    assert torch.isfinite(merged).all()
    assert not torch.equal(merged, dense)


@EVERY
def test_arguments_by_position(family):
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    apply_token_merging(model, settings(family))
    by_name = call(model, arguments)
    signature = inspect.signature(type(model).forward).parameters
    names = list(signature)[1:]
    last = max(names.index(name) for name in arguments)
    values = [arguments.get(name, signature[name].default) for name in names[: last + 1]]
    with torch.no_grad():
        result = model(*values)[0]
    result = torch.stack(list(result)) if isinstance(result, list | tuple) else result
    assert torch.equal(result, by_name)


@EVERY
def test_an_image_does_not_depend_on_its_batch(family):
    """Up to the host's own rounding: sums in another order, 1e-5 of the largest value."""
    if family.pool:
        pytest.skip("its position tables have no batch axis, so that images of a batch share a plan")
    model = model_of(family)
    apply_token_merging(model, settings(family))
    alone, together = call(model, family.inputs(1, 8, 8)), call(model, family.inputs(3, 8, 8))
    assert_close(together[:1], alone, rtol=1e-5, atol=1e-5 * alone.abs().max().item())


@EVERY
def test_images_that_share_a_plan_are_those_documented(family):
    assert all(block.batched != family.pool for block in find_hosts(model_of(family))[0].blocks)
