"""Threads that share a model: when it is in use, what is left in idle ones, and whose run is read."""

from __future__ import annotations

import contextlib
import gc
import queue
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import hosts
import pytest
import torch
import vits
from diffusers import DDIMScheduler, EulerDiscreteScheduler, StableDiffusionPipeline
from tests.runtime.test_shared_models import at_once, beside
from tests.runtime.test_steps_in_pipelines import draw

from tokenmerge import (
    ModelInUseError,
    StepReuse,
    ToMeConfig,
    ViTConfig,
    apply_token_merging,
    remove_token_merging,
    token_merging,
)
from tokenmerge.config import read_metadata
from tokenmerge.handle import Patch
from tokenmerge.models.find import find_hosts
from tokenmerge.runtime.memory.uses import Uses
from tokenmerge.runtime.steps.pipeline import Pipeline
from tokenmerge.runtime.steps.scheduler import scheduler_of

# The arithmetic of some schedulers of diffusers.
pytestmark = pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning")

HALF = ToMeConfig(ratio=0.5, max_downsample=2)
REUSED = ToMeConfig(ratio=0.5, max_downsample=2, reuse=StepReuse(every=2))
BOTH = pytest.mark.parametrize("config", [HALF, REUSED], ids=["merging", "reused"])
MOST_PICTURES = 400  # after which a test gives up waiting for another thread's turn


class Worker(threading.Thread):
    """A thread that does one thing after another, and stays idle in between."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._asked: queue.Queue[Any] = queue.Queue()
        self._done: queue.Queue[Any] = queue.Queue()
        self.start()

    def run(self) -> None:
        while (work := self._asked.get()) is not None:
            try:
                self._done.put(work())
            except BaseException as error:
                self._done.put(error.with_traceback(None))
            del work

    def do(self, work: Callable[[], Any]) -> Any:
        self._asked.put(work)
        return self._done.get(timeout=300)

    def end(self) -> None:
        self._asked.put(None)
        self.join()


@pytest.fixture
def worker():
    thread = Worker()
    yield thread
    thread.end()


def may_change(model: Any, config: ToMeConfig = HALF) -> bool:
    """Whether this thread may apply settings to a model now."""
    try:
        apply_token_merging(model, config)
    except ModelInUseError:
        return False
    return True


# --- in use --------------------------------------------------------------------------------------


@pytest.mark.parametrize("speedup", [None, 2.0], ids=["merging", "default"])
def test_a_thread_draws_while_another_applies_and_removes(pipe, speedup):
    """Each change happens or is refused, and each image is one of those drawn alone."""
    before = sys.getswitchinterval()
    other = beside(pipe)
    settings: dict[str, Any] = {"config": HALF} if speedup is None else {"speedup": speedup}
    dense = draw(other, 3)
    with token_merging(pipe, **settings):
        merged = draw(other, 3)
    assert not torch.equal(dense, merged)
    counts, over = {"changed": 0, "refused": 0}, threading.Event()

    def change() -> None:
        while not over.is_set():
            for work in (partial(apply_token_merging, pipe, **settings), partial(remove_token_merging, pipe)):
                try:
                    work()
                    counts["changed"] += 1
                except ModelInUseError:
                    counts["refused"] += 1

    def generate() -> list[torch.Tensor]:
        made = []
        try:
            while len(made) < MOST_PICTURES and (len(made) < 12 or min(counts.values()) <= 10):
                made.append(draw(pipe, 3))
            return made
        finally:
            over.set()

    sys.setswitchinterval(1e-5)
    try:
        pictures, nothing = at_once([generate, change])
    finally:
        sys.setswitchinterval(before)
    assert nothing is None
    assert not isinstance(pictures, Exception), pictures
    for picture in pictures:
        assert torch.equal(picture, dense) or torch.equal(picture, merged)
    assert counts["changed"] > 10
    assert counts["refused"] > 10


def changed_as_a_call_begins(monkeypatch: Any, change: Callable[[], Any], first: Any) -> list[type | None]:
    """Let a thread change a model between the moment that a call finds its settings and that it is noted.

    Returns what the thread raises, once ``first``, a part of the model, has been called.
    """
    begin, threads, seen = Uses.begin_call, [], []

    def run() -> None:
        try:
            change()
            seen.append(None)
        except Exception as error:
            seen.append(type(error))

    def meanwhile(uses: Uses, mark: Any) -> None:
        threads.append(threading.Thread(target=run))
        threads[-1].start()
        threads[-1].join(timeout=0.2)
        assert not seen  # it waits
        begin(uses, mark)

    def join(*_: Any) -> None:
        for thread in threads:
            thread.join()

    monkeypatch.setattr(Uses, "begin_call", meanwhile)
    first.register_forward_pre_hook(join)
    return seen


@pytest.mark.parametrize("change", ["apply", "remove"])
def test_a_change_waits_until_a_call_has_begun_and_is_then_refused(monkeypatch, change):
    unet = hosts.unet()
    patch = apply_token_merging(unet, HALF)
    expected = hosts.call(unet, **hosts.inputs())
    changes = {"apply": partial(apply_token_merging, unet, ToMeConfig(ratio=0.25)), "remove": patch.remove}
    seen = changed_as_a_call_begins(monkeypatch, changes[change], unet.conv_in)
    assert torch.equal(hosts.call(unet, **hosts.inputs()), expected)
    assert seen == [ModelInUseError]


class Growing:
    """A scheduler of a pipeline of which another thread sets attributes as its timesteps are read."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    @property
    def timesteps(self) -> torch.Tensor:
        setattr(self._pipe, f"set_by_another_thread_{len(vars(self._pipe))}", None)
        return torch.arange(3)


class Parts(list):
    """Parts of a pipeline of which another thread sets attributes as they are listed."""

    def __init__(self, pipe: Any, parts: list[Any]) -> None:
        super().__init__(parts)
        self._pipe = pipe

    def __iter__(self) -> Any:
        setattr(self._pipe, f"set_by_another_thread_{len(vars(self._pipe))}", None)
        return super().__iter__()


@pytest.mark.parametrize("read", ["models", "schedulers when patched", "schedulers in a call"])
def test_attributes_of_a_pipeline_may_be_set_as_it_is_looked_at(pipe, read):
    """By another thread that draws with it: pipelines note their guidance and their step."""
    before = len(vars(pipe))
    if read == "models":
        pipe.unets = Parts(pipe, [pipe.unet])
        assert find_hosts(pipe)[0].root is pipe.unet
    else:
        pipe.inverse_scheduler = Growing(pipe)
        if read == "schedulers when patched":
            Pipeline(pipe).note_patched()
        else:
            assert scheduler_of(pipe, torch.tensor(1)) is pipe.scheduler
    assert len(vars(pipe)) > before + 1


def test_a_dense_call_goes_on_where_another_thread_patches_and_restores_the_model(pipe):
    """It may have begun while the model was not patched, so nobody can know of it."""
    blocks = pipe.unet.down_blocks[0].attentions[0]
    called = torch.zeros(2, 32, 16, 16)
    patch = apply_token_merging(pipe, HALF)
    hooks = [*blocks._forward_pre_hooks.values()]  # as a call of the module lists them when it begins
    assert hooks
    patch.remove()
    for hook in hooks:
        assert hook(blocks, (called,), {}) is None


def test_no_thread_looks_into_the_frames_of_another(pipe, monkeypatch):
    monkeypatch.setattr(sys, "_current_frames", None)
    patch = apply_token_merging(pipe, HALF)
    refused = []

    def change(*_: Any) -> dict[str, Any]:
        refused.extend(at_once([patch.remove]))
        return {}

    draw(pipe, 2, callback_on_step_end=change)
    assert [type(error) for error in refused] == [ModelInUseError] * 2
    assert at_once([patch.remove]) == [None]


def loop(pipe: Any, steps: int, after_step: Callable[[int], None], until: int = 99, twice: bool = False):
    """A loop of one's own over a scheduler."""
    pipe.scheduler.set_timesteps(steps)
    sample, text = torch.randn(1, 4, 16, 16), torch.randn(1, 4, 16)
    for index, timestep in enumerate(pipe.scheduler.timesteps):
        with torch.no_grad():
            for _ in range(1 + twice):
                made = pipe.unet(sample, timestep, text).sample
                if twice:
                    after_step(index)
        sample = pipe.scheduler.step(made, timestep, sample).prev_sample
        if not twice:
            after_step(index)
        if index == until:
            return


@BOTH
@pytest.mark.parametrize("scheduler", [DDIMScheduler, EulerDiscreteScheduler])
def test_a_loop_over_a_scheduler_is_in_use_between_its_first_and_last_step(pipe, worker, config, scheduler):
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    apply_token_merging(pipe, config)
    seen = []
    try_it = partial(worker.do, partial(may_change, pipe, config))
    loop(pipe, 4, lambda index: seen.append(try_it()))
    assert seen == [False, False, False, True]


@BOTH
def test_of_two_calls_in_the_last_step_the_second_ends_it(pipe, worker, config):
    apply_token_merging(pipe, config)
    seen = []
    try_it = partial(worker.do, partial(may_change, pipe, config))
    loop(pipe, 3, lambda index: seen.append(try_it()), twice=True)
    assert seen == [False] * 5 + [True]


@BOTH
def test_a_loop_with_at_step_is_in_use_between_its_first_and_last_step(worker, config):
    unet = hosts.unet()
    patch = apply_token_merging(unet, config)
    seen = []
    for index in range(3):
        patch.at_step(index, 3)
        hosts.call(unet, **hosts.inputs(1))
        seen.append(worker.do(partial(may_change, unet, config)))
    assert seen == [False, False, True]


@BOTH
@pytest.mark.parametrize("ending", ["its thread ends", "another begins there", "its timesteps are gone"])
def test_a_loop_that_is_broken_off_ends_with(pipe, config, ending):
    apply_token_merging(pipe, config)
    worker = Worker()
    worker.do(partial(loop, pipe, 4, lambda index: None, until=1))
    assert not may_change(pipe, config)
    if ending == "its thread ends":
        worker.end()
    elif ending == "another begins there":
        worker.do(partial(draw, beside(pipe), 2))
    else:
        pipe.scheduler.set_timesteps(4)
    assert may_change(pipe, config)


@BOTH
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_call_that_raises_ends_its_use(pipe, worker, config, error):
    """In a pipeline, in a loop of one's own, and in a call by itself."""
    apply_token_merging(pipe, config)

    def fail(*_: Any) -> None:
        raise error

    def loop_without_errors() -> None:
        with contextlib.suppress(error):
            loop(pipe, 4, lambda index: None)

    def pipeline_without_errors() -> None:
        with contextlib.suppress(error):
            draw(pipe, 4)

    hook = pipe.unet.conv_out.register_forward_pre_hook(fail)
    worker.do(pipeline_without_errors)
    assert may_change(pipe, config)
    if error is RuntimeError:  # nobody is told of other interruptions of a loop's call
        worker.do(loop_without_errors)
        assert may_change(pipe, config)
    hook.remove()


def test_a_call_by_itself_that_was_interrupted_ends_its_use(worker):
    unet = hosts.unet()
    apply_token_merging(unet, HALF)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = unet.conv_out.register_forward_pre_hook(fail)
    assert isinstance(worker.do(lambda: hosts.call(unet, **hosts.inputs())), KeyboardInterrupt)
    hook.remove()
    assert may_change(unet)


def test_what_another_thread_began_before_merging_was_applied_stays_dense(pipe, worker):
    """Between two calls of the model, and in one."""
    expected = draw(pipe, 4)
    for config in (HALF, REUSED):
        apply_token_merging(pipe, config)
        merged = draw(pipe, 4)
        remove_token_merging(pipe)

        def apply_between(pipe: Any, step: int, *_: Any, config: ToMeConfig = config) -> dict[str, Any]:
            if step == 1:
                worker.do(partial(apply_token_merging, pipe, config))
            return {}

        assert torch.equal(draw(pipe, 4, callback_on_step_end=apply_between), expected)
        assert torch.equal(draw(pipe, 4), merged)  # the next one merges
        remove_token_merging(pipe)
        done = []

        def apply_within(*_: Any, config: ToMeConfig = config, done: list[Any] = done) -> None:
            if not done:
                done.append(worker.do(partial(apply_token_merging, pipe, config)))

        hook = pipe.unet.mid_block.resnets[0].register_forward_pre_hook(apply_within)
        assert torch.equal(draw(pipe, 4), expected)
        hook.remove()
        assert [type(one) for one in done] == [Patch]
        remove_token_merging(pipe)


def test_what_a_thread_applies_in_its_own_generation_holds_at_once(pipe):
    expected, seen = draw(pipe, 4), []

    def apply(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        if step == 1:
            apply_token_merging(pipe, HALF)
        elif step == 2:
            seen.extend(at_once([partial(may_change, pipe)]))
        return {}

    for _ in range(2):  # at first, the model is not patched before
        found = draw(pipe, 4, callback_on_step_end=apply)
        assert not torch.equal(found, expected)
    assert seen == [False, False]


@pytest.mark.parametrize("make", [vits.vit, vits.clip])
def test_a_vision_transformer_is_in_use_in_a_call(make, worker):
    model, config, seen = make(), ViTConfig(r=2), []
    pixels = torch.randn(1, 3, 24, 24)
    layers = [module for name, module in model.named_modules() if name.endswith("layers.2")]
    layers += [module for name, module in model.named_modules() if name.endswith("layer.2")]
    layer = layers[0]

    @torch.no_grad()
    def run() -> torch.Tensor:
        return model(pixel_values=pixels).last_hidden_state

    dense = run()
    apply_token_merging(model, config)
    merged = run()
    hook = layer.register_forward_pre_hook(
        lambda *_: seen.append(worker.do(partial(may_change, model, config)))
    )
    assert torch.equal(run(), merged)
    hook.remove()
    assert seen == [False]

    def fail(*_: Any) -> None:
        raise RuntimeError

    hook = layer.register_forward_pre_hook(fail)
    worker.do(run)
    hook.remove()
    assert may_change(model, config)

    remove_token_merging(model)

    def apply(*_: Any) -> None:
        worker.do(partial(apply_token_merging, model, config))

    hook = layer.register_forward_pre_hook(apply)
    assert torch.equal(run(), dense)  # another thread applied it in the middle of the call
    hook.remove()
    assert torch.equal(run(), merged)
    remove_token_merging(model)
    assert not model._forward_hooks_always_called


def test_a_change_of_a_vision_transformer_waits_until_a_call_has_begun(monkeypatch):
    model = vits.vit()
    patch = apply_token_merging(model, ViTConfig(r=2))
    seen = changed_as_a_call_begins(monkeypatch, patch.remove, model.embeddings)
    with torch.no_grad():
        model(pixel_values=torch.randn(1, 3, 24, 24))
    assert seen == [ModelInUseError]


def test_a_vision_transformer_runs_while_another_thread_applies_and_removes():
    model, config, over = vits.vit(), ViTConfig(r=2), threading.Event()
    pixels = torch.randn(1, 3, 24, 24)

    @torch.no_grad()
    def run() -> torch.Tensor:
        return model(pixel_values=pixels).last_hidden_state

    def change() -> None:
        while not over.is_set():
            for work in (partial(apply_token_merging, model, config), partial(remove_token_merging, model)):
                with contextlib.suppress(ModelInUseError):
                    work()

    def often() -> list[torch.Tensor]:
        try:
            return [run() for _ in range(100)]
        finally:
            over.set()

    dense = run()
    with token_merging(model, config):
        merged = run()
    found, nothing = at_once([often, change])
    assert nothing is None
    assert not isinstance(found, Exception), found
    assert all(torch.equal(one, dense) or torch.equal(one, merged) for one in found)


# --- what is left --------------------------------------------------------------------------------


def held() -> int:
    gc.collect()
    return sum(one.numel() * one.element_size() for one in gc.get_objects() if type(one) is torch.Tensor)


def broken_off(pipe: StableDiffusionPipeline) -> None:
    def cut(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
        pipe._interrupt = step == 3
        return {}

    draw(pipe, 8, callback_on_step_end=cut, height=64, width=64)


SETTINGS = pytest.mark.parametrize(
    "settings",
    [
        {"speedup": 2.0},
        {"config": ToMeConfig(ratio=0.5, max_downsample=2, planner="importance")},
        {"config": ToMeConfig(ratio=0.5, max_downsample=2, features="model_residual")},
    ],
    ids=["default", "importance", "residuals"],
)


@SETTINGS
def test_nothing_is_left_of_what_idle_threads_broke_off(pipe, settings):
    """As the next generation begins in any thread, in that thread with another scheduler, and as one ends."""
    workers = [Worker() for _ in range(3)]
    patch = apply_token_merging(pipe, **settings)
    own = beside(pipe)
    for thread in workers:  # what PyTorch and the model make once
        thread.do(partial(draw, pipe, 8, height=64, width=64))
    thread, *others = workers
    thread.do(partial(draw, own, 8, height=64, width=64))
    base = held()
    for one in others:
        one.do(partial(broken_off, pipe))
    assert held() > base + 10_000  # the last one's
    thread.do(partial(draw, pipe, 8, height=64, width=64))
    assert held() <= base

    thread.do(partial(broken_off, own))
    assert held() > base + 10_000
    thread.do(partial(draw, pipe, 8, height=64, width=64))
    assert held() <= base

    thread.do(partial(broken_off, own))
    thread.end()
    assert held() <= base

    others[0].do(partial(broken_off, own))
    others[1].do(partial(broken_off, pipe))
    patch.remove()
    assert held() <= base
    for one in others:
        one.end()


# --- whose run is read ---------------------------------------------------------------------------


def test_each_thread_reads_its_own_run_and_others_the_latest(pipe):
    patch = apply_token_merging(pipe, speedup=2.0)
    patch.record_steps()
    assert patch.estimate is None
    kinds = [{"steps": 6, "height": 32, "width": 32}, {"steps": 9, "height": 48, "width": 64}]

    def read() -> tuple[Any, ...]:
        report = patch.report()
        size = report.height, report.width, report.steps
        said = next(line for line in repr(patch).splitlines() if "last run" in line)
        return size, len(patch.steps.rows), patch.estimate, patch.metadata(), patch.config, said

    def alone(steps: int, **given: Any) -> tuple[Any, ...]:
        draw(pipe, steps, **given)
        return read()

    expected = [alone(**kind) for kind in kinds]
    assert expected[0][0] != expected[1][0]
    assert expected[0][2] != expected[1][2]
    barrier = threading.Barrier(2)

    def together(steps: int, **given: Any) -> list[tuple[Any, ...]]:
        def turn(pipe: Any, step: int, *_: Any) -> dict[str, Any]:
            if step < 6:  # one call of each after the other
                barrier.wait(timeout=60)
            return {}

        draw(beside(pipe), steps, callback_on_step_end=turn, **given)
        barrier.wait(timeout=60)
        return [read() for _ in range(5)]

    def comparable(run: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*run[:-1], run[-1].rpartition(",")[0])  # without its seconds

    found = at_once([partial(together, **kind) for kind in kinds])
    for runs, wanted in zip(found, expected, strict=True):
        assert not isinstance(runs, Exception), runs
        assert {comparable(run) for run in runs} == {comparable(wanted)}
    worker = Worker()
    worker.do(partial(alone, **kinds[0]))
    (other,) = at_once([read])  # in a thread that has run none
    assert comparable(other) == comparable(expected[0])
    assert comparable(read()) == comparable(expected[1])
    worker.end()
    assert read_metadata(patch.metadata()) is not None
