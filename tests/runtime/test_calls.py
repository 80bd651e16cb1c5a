"""Which of this package's functions run in a call of a merged model."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.models.test_every_family import call, model_of, settings
from tests.models.tiny import FAMILIES

import tokenmerge
from tokenmerge import PlanSharing, Rule, apply_token_merging
from tokenmerge.runtime.steps.pipeline import running_pipeline

PACKAGE = str(Path(tokenmerge.__file__).parent)


@pytest.fixture(autouse=True)
def no_other_model():
    """Models of other tests are gone: one with proportional attention stands before PyTorch's attention."""
    gc.collect()


def functions_called(run):
    """By (file, function) of this package: how often it was called."""
    found = Counter()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found[Path(code.co_filename).name, code.co_name] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


# Files that hold facts: what they compute follows from frozen values, or from the arguments of a host's call.
# Their names say what one gets, so that nobody has to follow a token into them.
FACTS = {
    "config/settings.py": "properties of the settings",
    "config/parts.py": "properties of the settings",
    "models/base.py": "which of a call's tokens are the image's, and the sides of their grid",
    "models/call.py": "the host's method, its parameters, and the arguments of its call, which it makes",
    "runtime/memory/state.py": "what a block is, and what holds for its running call",
}


def files_that_act(run):
    """Files of this package that are entered, but for those that only hold facts.

    A file that holds facts hands nothing on: what acts is never called from it.
    """
    found, handed_on = set(), set()

    def file_of(frame):
        file = "" if frame is None else frame.f_code.co_filename
        return Path(file).relative_to(PACKAGE).as_posix() if file.startswith(PACKAGE) else None

    def note(frame, event, _):
        file = file_of(frame)
        if event == "call" and file is not None and file not in FACTS:
            found.add(file)
            if file_of(frame.f_back) in FACTS:
                handed_on.add((file_of(frame.f_back), file))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    assert not handed_on
    return found


# 77 and 102 as this was written. A mode for all functions ran some 65 more.
@pytest.mark.parametrize(("scope", "most"), [("layers", 77), ("block", 102)])
@torch.no_grad()
def test_a_merged_block_runs_few_functions(scope, most):
    """With the plan of the blocks before it, and proportional attention."""
    family = FAMILIES["FluxTransformer2DModel"]
    config = settings(family, scope=scope, proportional=True, plans=PlanSharing(blocks=True))
    arguments, calls = family.inputs(1, 8, 8), []
    for depth in (1, 3):
        torch.manual_seed(0)
        made = dict(model_of(family).config)
        model = type(model_of(family)).from_config({**made, "num_single_layers": depth}).eval()
        apply_token_merging(model, config)
        call(model, arguments)
        calls.append(sum(functions_called(lambda model=model: call(model, arguments)).values()))
    assert 0 < (calls[1] - calls[0]) / 2 <= most


@torch.no_grad()
def test_where_nothing_merges_blocks_do_what_their_classes_do():
    """A step in which nothing merges, is skipped or is cached in blocks takes them one function more each."""
    family = FAMILIES["UNet2DConditionModel"]
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    patch = apply_token_merging(model, settings(family, rules=(Rule(start=0.5, changes={"ratio": 0.0}),)))

    def step(number):
        patch.at_step(number, 4)
        call(model, {**arguments, "timestep": arguments["timestep"] * (1 - 0.1 * number)})

    found = [functions_called(lambda number=number: step(number)) for number in range(4)]
    assert [own["forward.py", "_block"] > 0 for own in found] == [True, True, False, False]


@pytest.mark.parametrize("trains", [False, True])
def test_with_gradients_each_call_of_a_block_is_recorded(trains):
    """Gradient checkpointing runs it again, perhaps after a call in which something else merges."""
    family = FAMILIES["UNet2DConditionModel"]
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    patch = apply_token_merging(model, settings(family, rules=(Rule(start=0.5, changes={"ratio": 0.0}),)))
    with torch.set_grad_enabled(trains):
        for number in range(4):  # nothing merges in the last two
            patch.at_step(number, 4)
            now = {**arguments, "timestep": arguments["timestep"] * (1 - 0.1 * number)}
            found = functions_called(lambda now=now: model(**now))
    assert (found["forward.py", "_block"] > 0) is trains


class Nested:
    def call(self, depth, run):
        return run() if depth == 0 else self.call(depth - 1, run)


def test_finding_the_pipeline_calls_no_function_for_each_frame_of_the_stack():
    deep, flat = (functions_called(lambda d=depth: Nested().call(d, running_pipeline)) for depth in (50, 0))
    assert 0 < sum(deep.values()) == sum(flat.values())


@pytest.mark.parametrize("scope", ["layers", "block"])
@torch.no_grad()
def test_in_a_merged_block_ten_files_act(scope):
    """From its ``forward`` to the gather and back, with a new plan: what a reader steps into."""
    family = FAMILIES["UNet2DConditionModel"]
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    apply_token_merging(model, settings(family, scope=scope, planner="tome"))
    call(model, arguments)
    block = model.down_blocks[0].attentions[0].transformer_blocks[0]
    given = {}
    hook = block.register_forward_pre_hook(
        lambda _, args, kwargs: given.update(args=args, kwargs=kwargs), with_kwargs=True
    )
    call(model, arguments)
    hook.remove()
    assert files_that_act(lambda: block(*given["args"], **given["kwargs"])) == {
        *("runtime/blocks/forward.py", "runtime/blocks/planning.py", "runtime/blocks/merged_call.py"),
        *("planners/sequences.py", "planners/tome.py"),
        *("ops/partition.py", "ops/matching.py", "ops/plan.py", "ops/arithmetic.py"),
        "ops/once.py",  # it keeps what depends on the grid alone
    }
