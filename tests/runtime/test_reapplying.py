"""Settings that change between passes: applying again leaves what applying once does."""

import gc
import weakref
from typing import Any

import hosts
import pytest
import torch
from torch import nn

from tokenmerge import (
    Correction,
    StepReuse,
    ToMeConfig,
    apply_patch,
    apply_token_merging,
    remove_token_merging,
)
from tokenmerge.config import dense_outside
from tokenmerge.runtime.patching.patch import state_of

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs")
SETTINGS = {
    "merging": ToMeConfig(ratio=0.5, max_downsample=2),
    "blocks": ToMeConfig(ratio=0.4, scope="block", proportional=True),
    "over steps": ToMeConfig(
        ratio=0.25,
        rules=dense_outside(0, 0.8),
        correction=Correction(every=2),
        reuse=StepReuse(every=2, shallow_every=2),
    ),
}


def traces(model: nn.Module) -> dict[str, Any]:
    """Class, attributes and hooks of each module of a model, and the settings and parts of a patch."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        attributes = {name: type(value) for name, value in vars(module).items() if name not in HOOKS}
        hooks = [list(vars(module)[name].values()) for name in HOOKS]
        weights = [id(weight) for weight in module.parameters(recurse=False)]
        found[path] = type(module), attributes, hooks, weights
    if (state := state_of(model)) is not None:
        found["state"] = state.config, state.settings, state.phases, state.groups, len(state.pipeline.states)
        found["parts"] = [(type(part), part.path) for part in state.parts]
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_applying_n_times_leaves_what_applying_once_does(name):
    unet, others = hosts.unet(), [settings for other, settings in SETTINGS.items() if other != name]
    before = traces(unet)
    apply_token_merging(unet, SETTINGS[name])
    once = traces(unet)
    for settings in (SETTINGS[name], *others, SETTINGS[name]):
        apply_token_merging(unet, settings)
    assert traces(unet) == once
    apply_patch(unet, ratio=0.3)
    remove_token_merging(unet)
    assert traces(unet) == before


def test_the_next_pass_draws_what_it_draws_with_a_new_model():
    unet, arguments = hosts.unet(), hosts.inputs()
    expected = {}
    for name in ("merging", "blocks"):
        fresh = hosts.unet()
        apply_token_merging(fresh, SETTINGS[name])
        expected[name] = hosts.call(fresh, **arguments)
    assert not torch.equal(*expected.values())
    for name in ("merging", "blocks", "merging", "merging"):
        apply_token_merging(unet, SETTINGS[name])
        assert torch.equal(hosts.call(unet, **arguments), expected[name])


def test_nothing_of_earlier_passes_stays_in_memory():
    unet = hosts.unet()
    earlier = []
    for _ in range(3):
        apply_token_merging(unet, SETTINGS["over steps"])
        earlier.append(weakref.ref(state_of(unet)))
    gc.collect()
    assert [state() is None for state in earlier] == [True, True, False]


def test_hooks_of_other_software_stay_where_they_are():
    unet, calls = hosts.unet(), []
    unet.register_forward_pre_hook(lambda module, args: calls.append("before"))
    for name in SETTINGS:
        apply_token_merging(unet, SETTINGS[name])
        if name == "merging":
            unet.register_forward_hook(lambda module, args, result: calls.append("after"))
    apply_token_merging(unet, SETTINGS["merging"])
    hosts.call(unet, **hosts.inputs())
    assert calls == ["before", "after"]
