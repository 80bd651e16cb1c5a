"""The work of a call is computed from the sizes of weights as the counted report finds it by running."""

from __future__ import annotations

import dataclasses

import pytest
from tests.models.tiny import FAMILIES

from tokenmerge import Correction, MergeSharing, StepReuse, ToMeConfig
from tokenmerge.models.find import find_hosts
from tokenmerge.models.work import Amount, Work, work_of
from tokenmerge.plans import facts_of, speedup_of
from tokenmerge.report import predict

SIDE, STEPS = 16, 4  # of the token grid
KNOWN = (
    "UNet2DConditionModel",
    "UNet2DConditionModel, SDXL",
    "FluxTransformer2DModel",
    "SD3Transformer2DModel",
    "WanTransformer3DModel",
    "PixArtTransformer2DModel",
)
# Models in which whole blocks merge and are skipped, with text and tokens in other places.
OTHERS = (
    "QwenImageTransformer2DModel",
    "Flux2Transformer2DModel",
    "BriaFiboTransformer2DModel",
    "AuraFlowTransformer2DModel",
    "HunyuanVideoTransformer3DModel",
    "CogVideoXTransformer3DModel",
    "EasyAnimateTransformer3DModel",
    "MochiTransformer3DModel",
    "LTXVideoTransformer3DModel",
    "CosmosTransformer3DModel",
    "AllegroTransformer3DModel",
    "WanVACETransformer3DModel",
    "Ideogram4Transformer2DModel",
    "ErnieImageTransformer2DModel",
    "HiDreamImageTransformer2DModel",
)
MERGING = ToMeConfig(ratio=0.5, max_downsample=8, planner="tiled", merge_sharing=MergeSharing(blocks=True))
SETTINGS = {
    "layers": MERGING,
    "plans of their own": dataclasses.replace(MERGING, merge_sharing=MergeSharing()),
    "whole blocks": dataclasses.replace(MERGING, scope="block"),
    "corrected": dataclasses.replace(MERGING, correction=Correction(every=2)),
    "step reuse": dataclasses.replace(MERGING, ratio=0, reuse=StepReuse(every=2)),
    "all": dataclasses.replace(MERGING, sx=4, reuse=StepReuse(every=2, shallow_every=2)),
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *[(name, settings) for name in KNOWN for settings in SETTINGS],
        *[(name, settings) for name in OTHERS for settings in ("whole blocks", "step reuse")],
    ],
)
def test_the_speed_up_is_the_counted_one(name, settings):
    """To 1 %: a text whose length depends on the call is estimated."""
    model, config = FAMILIES[name].build(), SETTINGS[settings]
    host = find_hosts(model)[0]
    side = SIDE * host.patch
    report = predict(model, config, side, side, batch=1, steps=STEPS)
    counted = report.flops_dense / (report.flops_mean or report.flops_merged)
    facts = facts_of(host, (host.frames, SIDE, SIDE), STEPS)
    assert speedup_of(facts, config) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("name", KNOWN)
def test_work_scales_with_the_picture(name):
    """What is computed once gives the operations at any size."""
    model = FAMILIES[name].build()
    host = find_hosts(model)[0]
    work = work_of(host)
    for side in (8, 16):
        facts = dataclasses.replace(facts_of(host, (host.frames, side, side), 1), work=work)
        own = sum(2 * share.amount.at(facts.tokens(share.level)) for share in work.shares)
        report = predict(model, MERGING, side * host.patch, side * host.patch, batch=1)
        assert own == pytest.approx(report.flops_dense, rel=0.02)


def test_amounts_add():
    amount = Amount(1, 2, 3) + Amount(10, 20, 30)
    assert amount.at(2) == 11 + 22 * 2 + 33 * 4


def test_only_a_unet_has_a_finest_level():
    parts = {name: work_of(find_hosts(FAMILIES[name].build())[0]).parts for name in KNOWN}
    assert parts["UNet2DConditionModel"] == {"always", "finest", "deep"}
    assert parts["FluxTransformer2DModel"] == {"always", "blocks"}


def test_a_call_without_text_has_less_work():
    host = find_hosts(FAMILIES["FluxTransformer2DModel"].build())[0]

    def total(work: Work) -> float:
        return sum(share.amount.at(64) for share in work.shares)

    assert total(work_of(host, text=0)) < total(work_of(host, text=8)) < total(work_of(host, text=512))
