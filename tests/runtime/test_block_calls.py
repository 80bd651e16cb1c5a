"""Which calls of a block run code of this package, and which run the code of its own class."""

from __future__ import annotations

import pytest
import torch
from tests.models.test_every_family import model_of, settings
from tests.models.tiny import FAMILIES

from tokenmerge import Rule, apply_token_merging
from tokenmerge.runtime.blocks import forward
from tokenmerge.runtime.steps import pipeline

FAMILY = FAMILIES["UNet2DConditionModel"]
MERGES_AT_FIRST = (Rule(start=0.5, changes={"ratio": 0.0}),)
STEPS = 4


@pytest.fixture
def merged_calls(monkeypatch):
    """The calls of blocks that this package ran since the list was cleared."""
    found = []
    merged = forward._block

    def noted(state, block_call):
        found.append(state.path)
        return merged(state, block_call)

    monkeypatch.setattr(forward, "_block", noted)
    return found


def merged_by_step(model, arguments, merged_calls):
    """Run four steps, of which the last two merge nothing. Return whether blocks ran this package's code."""
    patch = apply_token_merging(model, settings(FAMILY, rules=MERGES_AT_FIRST))
    found = []
    for number in range(STEPS):
        patch.at_step(number, STEPS)
        merged_calls.clear()
        model(**{**arguments, "timestep": arguments["timestep"] * (1 - 0.1 * number)})
        found.append(bool(merged_calls))
    return found


@torch.no_grad()
def test_where_nothing_merges_blocks_do_what_their_classes_do(merged_calls):
    """So do blocks in a step in which nothing merges, is skipped or is cached."""
    found = merged_by_step(model_of(FAMILY), FAMILY.inputs(2, 8, 8), merged_calls)
    assert found == [True, True, False, False]


def test_with_gradients_each_call_of_a_block_is_recorded(merged_calls):
    """Gradient checkpointing runs it again, perhaps after a call in which something else merges."""
    found = merged_by_step(model_of(FAMILY), FAMILY.inputs(2, 8, 8), merged_calls)
    assert found == [True] * STEPS


class Nested:
    def call(self, depth, run):
        return run() if depth == 0 else self.call(depth - 1, run)


def test_finding_the_pipeline_looks_no_closer_at_objects_without_a_scheduler(monkeypatch):
    """Each call of a model searches the stack, which can be deep."""
    monkeypatch.setattr(pipeline, "is_pipeline", lambda owner: pytest.fail(f"looked at {owner}"))
    assert Nested().call(50, pipeline.running_pipeline) is None
