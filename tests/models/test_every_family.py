"""What must hold for every family of models, on tiny random models of the real classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.models.family import Family, seeded
from tests.models.tiny import FAMILIES, distinct, structure
from torch import Tensor, nn
from torch.testing import assert_close

from tokenmerge import NothingToMergeError, ToMeConfig, apply_token_merging, remove_token_merging
from tokenmerge.default_method import allows_proportional
from tokenmerge.models.find import find_hosts
from tokenmerge.ops.plan import Plan, make_plan
from tokenmerge.planners import PLANNERS
from tokenmerge.report import predict

# For laws that depend on facts about a family, and for those that follow from its structure alone.
EVERY = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
DISTINCT = pytest.mark.parametrize("family", [FAMILIES[name] for name in distinct()], ids=distinct())


def call(model: nn.Module, arguments: dict[str, Any] | list[Any]) -> Tensor:
    """The model's result for arguments by name or by position."""
    with torch.no_grad():
        return as_tensor(model, model(**arguments) if isinstance(arguments, dict) else model(*arguments))


def as_tensor(model: nn.Module, result: Any) -> Tensor:
    """The result of a model as one tensor, of which the first axis is that of the batch."""
    first = result if isinstance(result, Tensor) else result[0]
    if isinstance(first, Tensor):
        return first
    if find_hosts(model)[0].controlnet:  # what it adds to each level
        return torch.cat([level.flatten(1) for level in first], dim=1)
    return torch.stack(list(first))


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


def test_every_family_has_the_structure_of_exactly_one_distinct_one():
    known = {structure(FAMILIES[name]) for name in distinct()}
    assert len(known) == len(distinct()) < len(FAMILIES)
    assert known == {structure(family) for family in FAMILIES.values()}


def test_families_of_one_class_may_differ_and_of_two_classes_may_not():
    same, other = "SD3ControlNetModel of SD 3.5", "UVit2DModel, downsampling"
    assert same not in distinct()
    assert {"SD3ControlNetModel", "UVit2DModel", other} <= {*distinct()}
    assert structure(FAMILIES["ChromaTransformer2DModel"]) == structure(FAMILIES["FluxTransformer2DModel"])


@EVERY
def test_ratio_0_is_bit_equal(family):
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    dense = call(model, arguments)
    apply_token_merging(model, settings(family, ratio=0, merge_crossattn=True, merge_mlp=True))
    assert torch.equal(call(model, arguments), dense)


def reordering(features: Tensor, *_: Any) -> Plan:
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
    model, arguments = model_of(family), family.inputs(2, *family.fitting(grid))
    dense = call(model, arguments)
    monkeypatch.setitem(PLANNERS, "tome", reordering)
    apply_token_merging(model, settings(family, merge_crossattn=True, merge_mlp=True))
    reordered = call(model, arguments)
    assert_close(reordered, dense, rtol=1e-5, atol=1e-5 * dense.abs().max().item())


@DISTINCT
def test_half_of_the_tokens_never_reach_the_attention(family):
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    lengths: dict[str, list[int]] = {}
    host = find_hosts(model)[0]

    def watch(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
            lengths.setdefault(name, []).append(args[0].shape[1])

        return hook

    # The query projection is inside the patched layer.
    for block in host.blocks:
        for layer in block.layers:
            attention = getattr(block.module, layer.name)
            if layer.kind == "attn1":
                for name in (
                    "to_q",
                    "to_query",
                    "to_qkv",
                    "img_qkv_proj",
                    "to_qkv_mlp_proj",
                    "to_added_qkv",
                    "img_attn_qkv",
                ):
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
    fewer = [name for name in lengths if max(lengths[name]) < min(before[name])]  # perhaps image by image
    within = {
        b.path
        for b in host.blocks
        if b.level <= settings(family).max_downsample and any(layer.kind == "attn1" for layer in b.layers)
    }
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


@DISTINCT
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


@DISTINCT
@pytest.mark.parametrize(("grid", "batch"), [((7, 9), 1), ((4, 10), 3)])
def test_odd_and_oblong_sizes_and_any_batch(family, grid, batch):
    model, arguments = model_of(family), family.inputs(batch, *family.fitting(grid))
    dense = call(model, arguments)
    apply_token_merging(model, settings(family))
    merged = call(model, arguments)
    assert merged.shape == dense.shape
    assert torch.isfinite(merged).all()
    assert not torch.equal(merged, dense)


@DISTINCT
def test_tokens_merge_on_the_grid_that_they_have(family):
    """If rows were taken for columns, tokens would merge too, but not neighbours."""
    rows, columns = family.fitting((4, 10))
    model = model_of(family)
    patch = apply_token_merging(model, settings(family))
    with patch.record() as recorded:
        call(model, family.inputs(1, rows, columns))
    blocks = [block for block in find_hosts(model)[0].blocks if block.path in recorded]
    assert blocks
    for block in blocks:
        expected = (family.frames, -(-rows // block.level), -(-columns // block.level))
        assert recorded[block.path].grid == expected


@DISTINCT
def test_a_sample_in_which_nothing_would_merge_is_refused(family):
    """One column of tokens has no cell of 2 × 2."""
    rows, columns = family.fitting((4, 1))
    if columns > 1:
        pytest.skip("the model itself takes no single column")
    model = model_of(family)
    apply_token_merging(model, settings(family))
    with pytest.raises(NothingToMergeError, match="nothing to merge: the sample gives"):
        call(model, family.inputs(1, rows, columns))


@DISTINCT
def test_arguments_by_position(family):
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    apply_token_merging(model, settings(family))
    by_name = call(model, arguments)
    signature = inspect.signature(type(model).forward).parameters
    names = list(signature)[1:]
    last = max(names.index(name) for name in arguments)
    values = [arguments.get(name, signature[name].default) for name in names[: last + 1]]
    assert torch.equal(call(model, values), by_name)


# Hosts that cannot run in float64.
_IN_SINGLE_PRECISION = ("Cosmos", "Kandinsky5", "Krea2")


def in_double(value: Any) -> Any:
    """Return arguments with the numbers of their tensors in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: in_double(own) for name, own in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(in_double(own) for own in value)
    return value


@EVERY
@pytest.mark.parametrize("scope", ["layers", "block"])
def test_an_image_does_not_depend_on_its_batch(family, scope):
    """Up to the host's own rounding, as its sums have another order: 1e-5 of the largest value.

    In float64, no two edges are so alike that rounding sorts them. Hosts compute parts in float32 there.
    """
    if family.mixes:
        pytest.skip("the model itself lets the images of a batch see each other")
    model = model_of(family)
    hosts = find_hosts(model)
    if scope == "block" and all(block.block_layout is None for block in hosts[0].blocks):
        pytest.skip("its blocks cannot run on merged tokens as a whole")
    crossattn = scope == "layers" and any(
        layer.kind == "attn2" for block in hosts[0].blocks for layer in block.layers
    )
    proportional = allows_proportional(model, hosts)
    changes = {"scope": scope, "merge_crossattn": crossattn, "proportional": proportional, "seed": 1}
    inputs = [family.inputs(1, 8, 8), family.inputs(3, 8, 8)]
    if not type(model).__name__.startswith(_IN_SINGLE_PRECISION):
        model.double()
        inputs = in_double(inputs)
    apply_token_merging(model, settings(family, **changes))
    alone, together = (call(model, arguments) for arguments in inputs)
    assert_close(together[: len(alone)], alone, rtol=1e-5, atol=1e-5 * alone.abs().max().item())


@EVERY
def test_the_report_counts_a_call_of_the_model_and_names_every_block_that_merges(family):
    model = model_of(family)
    host = find_hosts(model)[0]
    config = settings(family)
    report = predict(model, config, 16, 16, batch=1)
    assert [row.path for row in report.rows] == [
        block.path
        for block in host.blocks
        if block.level <= config.max_downsample and any(layer.kind == "attn1" for layer in block.layers)
    ]
    assert all(row.merged_tokens == row.tokens // 2 for row in report.rows)
    assert all(row.path in str(report) for row in report.joined_rows())
    assert report.flops_merged < report.flops_dense or "costs more operations than it saves" in str(report)
