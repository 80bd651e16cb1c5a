"""Former public names still work, and warn."""

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest

import tokenmerge
from tokenmerge import ConfigError, MergeSharing, ToMeConfig, config, presets
from tokenmerge.config import FoundFor

KEPT = ToMeConfig(merge_sharing=MergeSharing(every=3))


def of_former_name(name: str) -> Any:
    return {
        "plans=": lambda: ToMeConfig(**{"plans": MergeSharing(every=3)}),
        "plans= of a copy": lambda: dataclasses.replace(ToMeConfig(), **{"plans": MergeSharing(every=3)}),
        "plans.every": lambda: ToMeConfig.from_dict({"plans.every": 3}),
        "plans": lambda: ToMeConfig.from_dict({"plans": {"every": 3}}),
        "a part": lambda: ToMeConfig.from_dict({"plans": MergeSharing(every=3)}),
    }[name]


@pytest.mark.parametrize("name", ["plans=", "plans= of a copy", "plans.every", "plans", "a part"])
def test_plans_are_taken_as_merge_sharing(name):
    make = of_former_name(name)
    with pytest.warns(DeprecationWarning, match="plans.* is deprecated; take merge_sharing"):
        assert make() == KEPT


def test_a_preset_takes_the_former_name_of_a_setting():
    with pytest.warns(DeprecationWarning, match=r"take merge_sharing\.every"):
        made = presets.tomesd(**{"plans.every": 3})
    assert made == presets.tomesd(**{"merge_sharing.every": 3})


def test_plans_of_a_config_are_its_merge_sharing():
    with pytest.warns(DeprecationWarning, match="ToMeConfig.merge_sharing") as found:
        assert KEPT.plans is KEPT.merge_sharing
    assert found[0].filename == __file__


@pytest.mark.parametrize("module", [tokenmerge, config])
def test_plan_sharing_is_merge_sharing(module):
    with pytest.warns(DeprecationWarning, match="MergeSharing"):
        assert module.PlanSharing is MergeSharing
    with pytest.raises(AttributeError, match="PlanShares"):
        module.PlanShares  # noqa: B018


def test_a_setting_under_both_names_is_refused():
    with (
        pytest.warns(DeprecationWarning, match=r"plans\.every"),
        pytest.raises(ConfigError, match=r"merge_sharing\.every: given twice"),
    ):
        ToMeConfig.from_dict({"plans.every": 2, "merge_sharing.every": 2})


def test_a_config_is_copied_and_described_as_before():
    assert pickle.loads(pickle.dumps(KEPT)) == copy.deepcopy(KEPT) == KEPT
    assert "merge_sharing" in inspect.signature(ToMeConfig).parameters
    assert "plans" not in KEPT.to_dict()


def test_the_solver_of_a_search_is_its_scheduler():
    with pytest.warns(DeprecationWarning, match="solver is deprecated; take scheduler"):
        found = FoundFor("UNet2DConditionModel", 64, 64, 20, **{"solver": "DDIMScheduler"})
    assert found == FoundFor("UNet2DConditionModel", 64, 64, 20, "DDIMScheduler")
    with pytest.warns(DeprecationWarning, match="FoundFor.scheduler"):
        assert found.solver == found.scheduler == "DDIMScheduler"
