"""Numbers that no float or text can hold are refused with a typed error, wherever a number is taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import hosts
import pytest

from tokenmerge import (
    Correction,
    MergeSharing,
    StepReuse,
    ToMeConfig,
    ViTConfig,
    apply_patch,
    apply_token_merging,
)
from tokenmerge.compat import apply_tome
from tokenmerge.config import FoundFor
from tokenmerge.default_method import settings_for
from tokenmerge.errors import TokenMergingError

HUGE = pytest.mark.parametrize("huge", [10**400, -(10**400), 10**5000, -(10**5000)], ids=[*"abcd"])


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(TokenMergingError) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@HUGE
@pytest.mark.parametrize("cls", [ToMeConfig, StepReuse, Correction, MergeSharing, ViTConfig])
def test_every_number_of_every_settings_class(cls, huge):
    plain = cls()
    for field in dataclasses.fields(cls):
        if not isinstance(getattr(plain, field.name), bool):
            refused(lambda name=field.name: cls(**{name: huge}))
            refused(lambda name=field.name: cls(**{name: (huge,)}))


@HUGE
@pytest.mark.parametrize("name", ["level", "start", "until", "guidance", "ratio", "sx", "reuse.every"])
def test_every_number_of_a_rule(name, huge):
    refused(lambda: ToMeConfig(rules=[{"start": 0.5, "min_tokens": 4, name: huge}]))


@HUGE
def test_the_other_functions_that_take_a_number(huge):
    unet = hosts.unet()
    for name in ("ratio", "sx", "sy"):
        refused(lambda name=name: apply_patch(unet, **{name: huge}))
        refused(lambda name=name: apply_tome(unet, **{name: huge}))
    for name in ("config", "ratio", "speedup"):
        refused(lambda name=name: apply_token_merging(unet, **{name: huge}))
    for name in ("start", "until"):
        refused(lambda name=name: apply_token_merging(unet, speedup=2.0, **{name: huge}))
    refused(lambda: apply_token_merging(unet, huge, ratio=huge))
    refused(lambda: settings_for(unet, huge))
    for arguments in ({"height": huge, "width": 8}, {"steps": huge}):
        refused(lambda arguments=arguments: settings_for(unet, 1.5, **arguments))
    refused(lambda: FoundFor("UNet2DConditionModel", huge, 8, 20))


@HUGE
def test_the_handle(huge):
    patch: Any = apply_token_merging(hosts.unet(), ToMeConfig(ratio=0.5))
    for arguments in (
        {"height": huge, "width": 8},
        {"batch": huge},
        {"steps": huge},
        {"references": [(huge, 8)]},
    ):
        refused(lambda arguments=arguments: patch.report(**arguments))
    refused(lambda: patch.at_step(huge, 3))
    refused(lambda: patch.at_step(0, huge))
    refused(lambda: patch.at_size(huge, 8))
    patch.remove()
