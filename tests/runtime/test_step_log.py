"""What each step of a run did, as the handle tells it when it was asked to record."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import threading
from typing import Any

import hosts
import pytest
import torch
import vits
from diffusers import StableDiffusionPipeline
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES
from tests.runtime.test_host_syncs import Waits
from tests.runtime.test_steps_in_pipelines import draw
from torch import Tensor

from tokenmerge import (
    ConfigError,
    Correction,
    MergeSharing,
    Patch,
    StepReuse,
    ToMeConfig,
    ViTConfig,
    apply_token_merging,
    token_merging,
)
from tokenmerge.config import dense_outside
from tokenmerge.plans.generation import StepKind
from tokenmerge.runtime.memory.run_log import StepLog, StepRow, clock, seconds_between
from tokenmerge.runtime.steps.scheduler import DenoisingStep, Generation

pytestmark = pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning")

STEPS = 8
SETTINGS = {
    "every step": ToMeConfig(ratio=0.5, max_downsample=2),
    "reused": ToMeConfig(ratio=0.5, max_downsample=2, reuse=StepReuse(every=2)),
    "until": ToMeConfig(ratio=0.5, max_downsample=2, rules=dense_outside(0, 0.5)),
    "corrected": ToMeConfig(ratio=0.5, max_downsample=2, correction=Correction(every=3)),
}
ALL = pytest.mark.parametrize("name", SETTINGS)


def recording(pipe: Any, name: str) -> Patch:
    patch = apply_token_merging(pipe, SETTINGS[name])
    patch.record_steps()
    return patch


def results_of(pipe: StableDiffusionPipeline, steps: int = STEPS) -> list[Tensor]:
    """What the model returned at each step, seen by a hook of the test."""
    seen = []
    hook = pipe.unet.register_forward_hook(
        lambda model, args, result: seen.append(result[0].double().clone())
    )
    draw(pipe, steps)
    hook.remove()
    return seen


@ALL
def test_recording_changes_nothing_and_waits_for_nothing(pipe, name):
    apply_token_merging(pipe, SETTINGS[name])
    with Waits() as before:
        expected = draw(pipe, STEPS)
    patch = recording(pipe, name)
    with Waits() as waits:
        assert torch.equal(draw(pipe, STEPS), expected)
    assert waits.found == before.found
    assert len(patch.steps) == STEPS


def test_of_the_steps_some_are_full_some_shallow_and_some_dense(pipe):
    kinds = {name: [] for name in SETTINGS}
    for name in SETTINGS:
        patch = recording(pipe, name)
        draw(pipe, STEPS)
        kinds[name] = [(row.step_kind, row.merging_calls > 0) for row in patch.steps]
        assert [row.step for row in patch.steps] == list(range(STEPS))
    merges = ("full", True)
    is_dense = ("full", False)
    assert kinds["every step"] == [merges] * STEPS
    assert kinds["until"] == [merges] * 4 + [is_dense] * 4
    corrected = [is_dense, merges, merges]
    assert kinds["corrected"] == [*corrected, *corrected, *corrected][:STEPS]
    full = SETTINGS["reused"].reuse.steps_of(STEPS).full
    assert kinds["reused"] == [merges if i in full else ("shallow", True) for i in range(STEPS)]


@ALL
def test_tokens_and_blocks_are_those_of_the_plans(pipe, name):
    """In a step that merges everywhere, each block leaves a plan."""
    patch = recording(pipe, name)
    with patch.record() as plans:
        draw(pipe, STEPS)
    rows = patch.steps.rows
    shapes = [(p.plan.inverse.shape[1], p.plan.keep.shape[1]) for p in plans.values()]
    merging = [row for row in rows if row.step_kind == "full" and row.merging_calls]
    assert {row.merging_calls for row in merging} == {len(plans)}
    assert {(row.tokens, row.merged_tokens) for row in merging} == {max(shapes)}
    for row in rows:
        if row.step_kind == "full" and not row.merging_calls:
            assert (row.merging_calls, row.tokens, row.merged_tokens) == (0, None, None)
        if row.step_kind == "shallow":
            assert 0 < row.merging_calls < len(plans)


def test_the_plan_of_another_run_is_not_shown_beside_the_steps(pipe):
    """The handle knows the settings of the run that began last, in whichever thread."""
    patch = recording(pipe, "reused")
    draw(pipe, STEPS)
    assert "".join(row.sign for row in patch.steps) == patch.report().step_signs
    run = patch._state.last_run
    run.config = dataclasses.replace(run.config, reuse=StepReuse())
    assert {row.sign for row in patch.steps} == {""}
    assert " kind " in str(patch.steps)


def test_a_step_may_call_the_model_twice():
    """Guidance in two calls: blocks and time of both."""
    model = hosts.unet()
    patch = apply_token_merging(model, ToMeConfig(ratio=0.5))
    patch.record_steps()
    with torch.no_grad():
        for step in range(3):
            patch.at_step(step, 3)
            sample = hosts.inputs(seed=step)
            for text in hosts_texts(sample):
                model(**{**sample, "encoder_hidden_states": text})
    assert [row.merging_calls for row in patch.steps] == [6, 6, 6]  # three blocks at level 1, two calls


def hosts_texts(sample: dict[str, Any]) -> tuple[Tensor, Tensor]:
    text = sample["encoder_hidden_states"]
    return text, text.flip(1)


def test_the_seconds_of_a_step_are_those_in_the_model(pipe, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("tokenmerge.runtime.memory.run_log.time.perf_counter", lambda: next(clock))
    patch = recording(pipe, "every step")
    draw(pipe, 3)
    seconds = [row.seconds for row in patch.steps]
    # Read at the start and the end of each call; the run's own log looks at the same clock.
    assert len(set(seconds)) == 1
    assert all(value >= 1 for value in seconds)


def test_a_cuda_device_is_timed_by_its_own_events(monkeypatch):
    noted = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            noted.append(stream)

        def synchronize(self) -> None:
            noted.append("waited")

        def elapsed_time(self, end: object) -> float:
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device.type)
    began, ended = (clock(torch.device("cuda")) for _ in range(2))
    assert noted == ["cuda", "cuda"]
    assert seconds_between(began, ended) == 0.25
    assert noted[-1] == "waited"


def test_each_generation_has_a_log_of_its_own(pipe):
    patch = recording(pipe, "reused")
    draw(pipe, STEPS)
    assert len(patch.steps) == STEPS
    draw(pipe, 3)
    assert len(patch.steps) == 3


def test_each_thread_sees_its_own_generation(pipe):
    patch = recording(pipe, "reused")
    draw(pipe, STEPS)
    seen = []

    def other() -> None:
        seen.append(len(patch.steps))  # of the last generation anywhere, before it ran one
        draw(pipe, 3)
        seen.append(len(patch.steps))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [STEPS, 3]
    assert len(patch.steps) == STEPS


def test_removing_ends_it_and_leaves_nothing_on_the_model(pipe):
    before = dict(pipe.unet.__dict__)
    patch = recording(pipe, "every step")
    draw(pipe, 2)
    patch.remove()
    assert pipe.unet.__dict__ == before
    assert len(patch.steps) == 2
    draw(pipe, 4)
    assert len(patch.steps) == 2
    with pytest.raises(ConfigError, match="this patch was removed"):
        patch.record_steps()


def test_stopping_leaves_no_hook(pipe):
    patch = apply_token_merging(pipe, SETTINGS["reused"])
    hooks = dict(pipe.unet._forward_hooks)
    for _ in range(2):  # twice on is once
        patch.record_steps()
    assert pipe.unet._forward_hooks == hooks
    draw(pipe, 2)
    assert len(patch.steps) == 2
    patch.record_steps(False)
    assert pipe.unet._forward_hooks == hooks
    with pytest.raises(ConfigError, match=r"nothing was recorded; call patch\.record_steps\(\)"):
        _ = patch.steps


def test_a_patch_that_comes_back_after_another_one_still_records(pipe):
    patch = recording(pipe, "every step")
    with token_merging(pipe, ToMeConfig(ratio=0.25)):
        draw(pipe, 2)
    draw(pipe, 3)
    assert len(patch.steps) == 3
    assert all(row.seconds > 0 for row in patch.steps)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_does_not_write_into_the_log(pipe, copied):
    patch = recording(pipe, "every step")
    draw(pipe, 2)
    draw(copied(pipe), 4)
    assert len(patch.steps) == 2


def test_without_a_step_nothing_is_recorded():
    model = hosts.unet()
    patch = apply_token_merging(model, ToMeConfig(ratio=0.5))
    patch.record_steps()
    model(**hosts.inputs())
    with pytest.raises(ConfigError, match="no step was recorded yet; generate first"):
        _ = patch.steps


def test_a_vision_transformer_has_no_steps():
    patch = apply_token_merging(vits.vit(), ViTConfig(r=1))
    with pytest.raises(ConfigError, match="a vision transformer has no denoising steps"):
        patch.record_steps()
    with pytest.raises(ConfigError, match="a vision transformer has no denoising steps"):
        _ = patch.steps


@pytest.mark.parametrize("shared", [True, False], ids=["plans are cached", "each call plans"])
@torch.no_grad()
def test_blocks_that_are_compiled_record_as_others_do_in_as_many_graphs(shared):
    family = FAMILIES["WanTransformer3DModel"]

    def run(record: bool) -> tuple[int, Patch]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = model_of(family)
        patch = apply_token_merging(model, ToMeConfig(ratio=0.5, merge_sharing=MergeSharing(guidance=shared)))
        if record:
            patch.record_steps()
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        for step in range(3):
            patch.at_step(step, 3)
            arguments = family.inputs(2, 8, 8)
            arguments["timestep"] = arguments["timestep"] - step
            call(model, arguments)
        return torch._dynamo.utils.counters["stats"]["unique_graphs"], patch

    off, _ = run(record=False)
    on, patch = run(record=True)
    assert on == off  # with a plan as another input
    rows = patch.steps.rows
    assert [row.merging_calls for row in rows] == [2, 2, 2]
    assert rows[0].merged_tokens == rows[0].tokens // 2


def test_a_step_is_of_the_kind_of_the_call_that_runs_least():
    kinds = [
        (StepKind.SHALLOW, StepKind.FULL),
        (StepKind.SKIPPED, StepKind.FULL),
        (StepKind.FULL, StepKind.SKIPPED, StepKind.SHALLOW),
        (StepKind.FULL,) * 2,
    ]
    log, generation = StepLog(), Generation(0)
    for index, calls in enumerate(kinds):
        for kind in calls:
            log.begin_call(DenoisingStep(index, 4, generation), kind, torch.device("cpu"))
            log.end_call()
    assert [row.step_kind for row in log.rows()] == ["shallow", "skipped", "skipped", "full"]


def test_the_table_says_it_all(pipe):
    patch = recording(pipe, "until")
    draw(pipe, 4)
    lines = str(patch.steps).splitlines()
    assert re.fullmatch(r"4 steps, \d\.\d\d s in the model", lines[0])
    assert lines[1].split() == ["step", "plan", "tokens", "times", "seconds"]
    side = 64 // pipe.vae_scale_factor
    first = patch.steps.rows[0]
    assert lines[2].split()[:6] == [
        "0",
        "M",
        str(first.tokens),
        "→",
        str(first.tokens // 2),
        str(first.merging_calls),
    ]
    assert first.tokens in (side * side, pipe.unet.config.sample_size**2)
    assert lines[5].split()[:3] == ["3", "D", "0"]
    assert lines[6] == "note: M in 2 full steps: the whole model runs, and tokens merge"
    assert "<table>" in patch.steps._repr_html_()
    assert patch.steps.to_dicts()[3]["step_kind"] == patch.steps[3].step_kind == "full"


def test_the_former_word_for_the_kind_of_a_step_is_told_with_a_warning():
    rows = {
        "merged": StepRow(0, "full", 4, 64, 32, 0.1),
        "unmerged": StepRow(1, "full", 0, None, None, 0.1),
        "reused": StepRow(2, "shallow", 2, 64, 32, 0.1),
    }
    for former, row in rows.items():
        with pytest.warns(DeprecationWarning, match="step_kind"):
            assert row.kind == former


def test_what_is_alike_in_all_steps_stands_in_the_title(pipe):
    patch = apply_token_merging(pipe, ratio=0.5)
    patch.record_steps()
    draw(pipe, 4)
    first, lines = patch.steps[0], str(patch.steps).splitlines()
    merged = f"{first.merging_calls} calls of blocks merge {first.tokens} → {first.tokens // 2} tokens"
    assert lines[0].endswith(f" s in the model; in each, {merged}")
    assert lines[1].split() == ["step", "plan", "seconds"]
    assert not any(line.startswith("note: tokens:") for line in lines)
    patch = apply_token_merging(pipe, ToMeConfig(ratio=0, reuse=StepReuse(every=2)))
    patch.record_steps()
    draw(pipe, 4)
    assert re.fullmatch(r"4 steps, \d\.\d\d s in the model", str(patch.steps).splitlines()[0])
