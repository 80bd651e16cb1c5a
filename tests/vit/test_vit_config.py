"""Settings for vision transformers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmerge import ConfigError, DecreasingSchedule, ViTConfig


@given(r=st.integers(0, 200), depth=st.integers(1, 60))
def test_a_decreasing_schedule_removes_as_many_tokens_as_a_constant_one(r, depth):
    """It starts at 2r, ends at 0, never rises, and is always less than one token from a straight line."""
    schedule = DecreasingSchedule(r).per_layer(depth)
    assert len(schedule) == depth
    assert sum(schedule) == r * depth
    assert list(schedule) == sorted(schedule, reverse=True)
    if depth > 1:
        assert (schedule[0], schedule[-1]) == (2 * r, 0)
        assert all(abs(n - 2 * r * (depth - 1 - i) / (depth - 1)) < 1 for i, n in enumerate(schedule))


def test_a_sequence_is_kept_as_plain_values():
    config = ViTConfig(r=[3, 2, 1])
    assert config.r == (3, 2, 1)
    assert hash(config) == hash(ViTConfig(r=(3, 2, 1)))
    assert config.to_dict() == {"r": (3, 2, 1), "proportional_attention": True, "unmerge": False}
    assert ViTConfig(r=DecreasingSchedule(2)).to_dict()["r"] == {"r": 2}


@pytest.mark.parametrize("r", [-1, 1.5, True, "8", None])
def test_values_of_r_that_are_refused(r):
    with pytest.raises(ConfigError, match="r: expected an integer ≥ 0, a sequence of them"):
        ViTConfig(r=r)
    with pytest.raises(ConfigError, match="r: expected an integer ≥ 0, got"):
        DecreasingSchedule(r)
    with pytest.raises(ConfigError, match=r"r\[1\]: expected an integer ≥ 0, got"):
        ViTConfig(r=[1, r])


@pytest.mark.parametrize("field", ["proportional_attention", "unmerge"])
def test_switches_are_true_or_false(field):
    with pytest.raises(ConfigError, match=f"{field}: expected True or False, got 1"):
        ViTConfig(**{field: 1})
