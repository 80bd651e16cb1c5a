"""A stack of blocks merges once, and gives what merging around each of its blocks gives."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from tests.models.family import Family
from tests.models.test_every_family import EVERY, call, model_of, settings
from tests.models.test_over_steps import whole
from tests.models.tiny import FAMILIES
from torch import Tensor, nn

from tokenmerge import Correction, MergeSharing, StepReuse, apply_token_merging
from tokenmerge.models.find import find_hosts
from tokenmerge.ops.plan import MergePlan
from tokenmerge.runtime.blocks import stack

# In float32, sums in another order differ by some units of the last place for each block: 1e-5 of the largest
# value is far above that, and 100 dB.
_DECIBELS = 100.0
_STEPS = 5
_STACKS = {"scope": "block", "merge_sharing": MergeSharing(blocks=True), "ratio": 0.5}
_KINDS = {
    "plain": {},
    "corrected": {"correction": Correction(every=3)},
    "by what the model added": {"correction": Correction(every=9), "features": "model_residual"},
    "with step reuse": {
        "correction": Correction(every=2),
        "features": "model_residual",
        "reuse": StepReuse(every=2),
    },
}


def decibels(found: Tensor, wanted: Tensor) -> float:
    """Signal-to-noise ratio of a result to another one, in dB."""
    error = (found - wanted).square().mean().item()
    return math.inf if error == 0 else 10 * math.log10(wanted.square().mean().item() / error)


def samples(family: Family, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """The arguments of a call in each step: the samples change a little, as in a generation."""
    first = {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in family.inputs(2, 8, 8).items()
    }
    generator = torch.Generator().manual_seed(1)

    def moved(name: str, value: Any) -> Any:
        is_sample = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 2
        stays = any(word in name for word in ("text", "encoder", "embed", "rotary", "ids", "coords"))
        if not is_sample or stays:
            return value
        return value + 0.05 * torch.randn(value.shape, generator=generator, dtype=dtype)

    return [{name: moved(name, value) for name, value in first.items()} for _ in range(_STEPS)]


def generation(model: nn.Module, family: Family, **changes: Any) -> list[Tensor]:
    """The results of the steps of one generation."""
    patch = apply_token_merging(model, settings(family, **{**_STACKS, **changes}))
    results = []
    for index, arguments in enumerate(samples(family, next(model.parameters()).dtype)):
        patch.at_step(index, _STEPS + 1)
        results.append(call(model, arguments))
    patch.remove()
    return results


def block_by_block(monkeypatch: pytest.MonkeyPatch, *args: Any, **changes: Any) -> list[Tensor]:
    """The results where each block merges by itself."""
    with monkeypatch.context() as patched:
        patched.setattr(stack, "merges_in_stacks", lambda *_: False)
        return generation(*args, **changes)


def is_unet(model: nn.Module) -> bool:
    """Whether the blocks are in transformers of a UNet or of its ControlNet."""
    return any(block.grid is not None for block in find_hosts(model)[0].blocks)


# In float32, rounding would sort edges of its residuals that are almost equal.
_WITH_EQUAL_EDGES = ("Latte", "LTX")


@EVERY
@pytest.mark.parametrize("kind", _KINDS)
def test_a_stack_is_what_its_blocks_are_one_by_one(family, kind, monkeypatch):
    model, changes = model_of(family), _KINDS[kind]
    if not whole(model):
        pytest.skip("no block of it can run as a whole")
    if is_unet(model) and "features" in changes:
        pytest.skip("these features are for transformers; here equal edges are sorted by rounding")
    if type(model).__name__.startswith(_WITH_EQUAL_EDGES):
        model.double()
    wanted = block_by_block(monkeypatch, model, family, **changes)
    for found, one in zip(generation(model, family, **changes), wanted, strict=True):
        assert decibels(found, one) >= _DECIBELS


# How many stacks a model has, by the beginning of its class; 1 is the default. The others add a control, a
# face or motion between blocks, run blocks over other axes, put text and image into one sequence, or have a
# list of blocks for the image alone before the others. FIBO and HiDream join another text embedding for each
# block. UniDiffuser joins tokens of an earlier block between two.
_STACKS_OF = {
    "AuraFlow": 2,
    "BriaFibo": None,
    "Chroma": 2,
    "Flux2": 2,
    "HiDream": None,
    "Latte": None,
    "Lumina2": 2,
    "UVit": 3,
    "UniDiffuser": None,
    "WanAnimate": None,
    "WanVACE": None,
    "ZImage": 2,
}


@EVERY
def test_the_blocks_of_a_transformer_merge_once(family, monkeypatch):
    model = model_of(family)
    host = find_hosts(model)[0]
    named = [stacks for name, stacks in _STACKS_OF.items() if type(model).__name__.startswith(name)]
    (stacks,) = named or [1]
    can_merge = all(block.block_layout is not None for block in host.blocks)
    if is_unet(model) or host.controlnet or stacks is None or not can_merge:
        pytest.skip("how many stacks it has depends on what stands between its blocks")
    unmerged = []
    own = MergePlan.unmerge
    monkeypatch.setattr(MergePlan, "unmerge", lambda plan, y: unmerged.append(0) or own(plan, y))
    generation(model, family)
    assert len(unmerged) == stacks * _STEPS


@pytest.fixture
def sd3() -> tuple[nn.Module, Family]:
    family = FAMILIES["SD3Transformer2DModel"]
    return model_of(family), family


def middle_block(model: nn.Module) -> nn.Module:
    """The first block, after which others follow."""
    return model.transformer_blocks[0]


class Between:
    """Hooks on a block that look at its tokens in some way."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.tokens: Tensor | None = None

    def adds(self, module: nn.Module, args: Any, result: Any) -> Any:
        """Change the image tokens, as the residual of a ControlNet does."""
        text, image = result
        return text, image + 0.1

    def adds_in_place(self, module: nn.Module, args: Any, result: Any) -> Any:
        """Change the image tokens in place."""
        text, image = result
        image += 0.1
        return text, image

    def reads(self, module: nn.Module, args: Any, result: Any) -> None:
        """Look at the image tokens, as a controller does."""
        self.kept.append(result[1].norm())

    def keeps(self, module: nn.Module, args: Any, result: Any) -> None:
        """Keep the image tokens for later in the call, as a skip connection does."""
        self.tokens = result[1]

    def after_model(self, module: nn.Module, args: Any, result: Any) -> None:
        """Read the tokens that were kept."""
        if self.tokens is not None:
            self.kept.append(self.tokens + 0)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("hook", ["adds", "adds_in_place", "reads", "keeps"])
def test_a_stack_ends_where_something_looks_at_its_tokens(hook, kind, sd3, monkeypatch):
    model, family = sd3
    seen = []
    for run in (partial(block_by_block, monkeypatch), generation):
        between = Between()
        handles = [
            middle_block(model).register_forward_hook(getattr(between, hook)),
            model.register_forward_hook(between.after_model),
        ]
        seen.append([*run(model, family, **_KINDS[kind]), *between.kept])
        for handle in handles:
            handle.remove()
    for step, (wanted, found) in enumerate(zip(*seen, strict=True)):
        # Tokens that are read later are noticed late: the next step measures again.
        if hook == "keeps" and "correction" in _KINDS[kind] and step % _STEPS >= 1:
            continue
        assert decibels(found, wanted) >= _DECIBELS


def test_tokens_that_are_read_later_cost_one_measured_step(sd3):
    model, family = sd3
    inputs, between = samples(family), Between()
    dense = [call(model, arguments) for arguments in inputs]
    handles = [
        middle_block(model).register_forward_hook(between.keeps),
        model.register_forward_hook(between.after_model),
    ]
    found = generation(model, family, correction=Correction(every=20))
    for handle in handles:
        handle.remove()
    errors = [decibels(one, other) for one, other in zip(found, dense, strict=True)]
    assert errors[:2] == [math.inf] * 2
    assert min(errors[2:]) < math.inf


def test_a_hook_that_comes_later_costs_one_measured_step(sd3, monkeypatch):
    """What a stack added before is not given back to another stack; the next step measures anew."""
    model, family = sd3
    patch = apply_token_merging(model, settings(family, **_STACKS, correction=Correction(every=20)))
    inputs, between, results = samples(family), Between(), []
    for index, arguments in enumerate(inputs):
        if index == 2:
            handle = middle_block(model).register_forward_hook(between.reads)
        patch.at_step(index, _STEPS + 1)
        results.append(call(model, arguments))
    handle.remove()
    patch.remove()
    dense = [call(model, arguments) for arguments in inputs]
    errors = [decibels(one, other) for one, other in zip(results, dense, strict=True)]
    assert errors[0] == errors[3] == math.inf
    assert errors[4] > errors[2]
    assert len(between.kept) == 3


def test_skipped_layers_belong_to_the_stack(sd3, monkeypatch):
    """Skip-layer guidance leaves blocks out; those around them are one stack."""
    model, family = sd3
    inputs = family.inputs(2, 8, 8) | {"skip_layers": [1]}
    changes = settings(family, **_STACKS)
    with monkeypatch.context() as patched:
        patched.setattr(stack, "merges_in_stacks", lambda *_: False)
        patch = apply_token_merging(model, changes)
        wanted = call(model, inputs)
        patch.remove()
    patch = apply_token_merging(model, changes)
    assert decibels(call(model, inputs), wanted) >= _DECIBELS


@pytest.mark.parametrize("inference", [False, True])
def test_tokens_between_blocks_look_like_ordinary_ones(sd3, inference):
    model, family = sd3
    seen: list[Any] = []
    handle = middle_block(model).register_forward_hook(lambda module, args, result: seen.append(result[1]))
    apply_token_merging(model, settings(family, **_STACKS))
    with torch.inference_mode(inference):
        call(model, family.inputs(2, 8, 8))
        (tokens,) = seen
        assert isinstance(tokens, stack.StackTokens)
        assert tokens.shape == (2, 64, model.inner_dim)
        assert tokens.dtype == torch.float32
        assert type(tokens + 1) is Tensor
        assert torch.equal(torch.cat([tokens, tokens], dim=1)[:, :64], tokens.clone())
        assert tokens.detach().numpy().shape == tokens.shape
    handle.remove()
