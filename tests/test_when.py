"""Where in a generation a call is."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from tokenmerge import ConfigError, ToMeConfig
from tokenmerge.when import Clock, moment


def scheduler(*timesteps):
    return SimpleNamespace(timesteps=torch.tensor(timesteps))


def ticks(clock, *timesteps):
    seen = []
    for timestep in timesteps:
        clock.tick(timestep)
        seen.append((clock.generation, clock.index, clock.turn, clock.total))
    return seen


def test_steps_are_counted_by_the_timestep():
    clock = Clock(scheduler(800, 600, 400))
    assert ticks(clock, 800, 600, 400) == [(1, 0, 0, 3), (1, 1, 0, 3), (1, 2, 0, 3)]


def test_two_calls_at_a_timestep_are_one_step():
    assert ticks(Clock(scheduler(8, 6)), 8, 8, 6, 6) == [
        (1, 0, 0, 2),
        (1, 0, 1, 2),
        (1, 1, 0, 2),
        (1, 1, 1, 2),
    ]


def test_new_timesteps_begin_a_generation_even_at_the_same_timestep():
    pipe = scheduler(999)
    clock = Clock(pipe)
    clock.tick(999)
    pipe.timesteps = torch.tensor([999])
    assert ticks(clock, 999) == [(2, 0, 0, 1)]


def test_timesteps_that_rise_and_repeat():
    """As Lumina 2's, which are told as 1 − t, and those of a second-order scheduler."""
    assert [tick[1] for tick in ticks(Clock(scheduler(1.0, 0.5)), 0.0, 0.5)] == [0, 1]
    assert [tick[3] for tick in ticks(Clock(scheduler(9, 6, 6, 3, 3)), 9, 6, 6, 3, 3)] == [3] * 5


def test_image_to_image_begins_late():
    assert ticks(Clock(scheduler(800, 600, 400, 200)), 400, 200) == [(1, 0, 0, 2), (1, 1, 0, 2)]


def test_without_a_scheduler_the_caller_says_when_a_generation_begins():
    clock = Clock()
    clock.begin(2)
    ticks(clock, 8, 4)
    clock.begin(2)
    assert ticks(clock, 8) == [(clock.generation, 0, 0, 2)]


def test_copies_follow_the_same_scheduler_and_pickles_none():
    clock = Clock(scheduler(8))
    assert copy.deepcopy(clock).scheduler is clock.scheduler
    assert pickle.loads(pickle.dumps(clock)).scheduler is None


def test_until_spares_the_last_steps_and_needs_their_number():
    config = ToMeConfig(until=0.75)
    assert [moment(config, i, 20).merges for i in range(20)] == [True] * 15 + [False] * 5
    with pytest.raises(ConfigError, match=r"until=0.75 needs to know how many steps there are"):
        moment(config, 0, None)


def test_held_plans_are_made_every_so_many_steps():
    assert [moment(ToMeConfig(plan_every=3), i, 7).plans for i in range(7)] == [True, False, False] * 2 + [
        True
    ]
