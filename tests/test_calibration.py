"""The timing of attention, which says from which number of tokens on merging is faster."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hosts
import pytest
import torch
from tests.models.tiny import FAMILIES

from tokenmerge.default_method import settings_for
from tokenmerge.models.placement import narrowest
from tokenmerge.ops.plan import IndexPlan
from tokenmerge.planners import calibration
from tokenmerge.planners.calibration import Attention

MPS = torch.device("mps")  # another device than a CPU; it need not be there


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def pipeline(**models: Any) -> SimpleNamespace:
    return SimpleNamespace(**models, scheduler=SimpleNamespace(timesteps=None))


@pytest.mark.parametrize(
    ("stored", "norms", "timed"),
    [
        (torch.float16, torch.float16, torch.float16),
        (torch.float8_e4m3fn, torch.bfloat16, torch.bfloat16),
        (torch.uint8, torch.float16, torch.float16),
        (torch.int8, torch.int8, torch.bfloat16),
    ],
)
def test_grids_are_timed_in_what_the_model_computes_in(stored, norms, timed, monkeypatch):
    """Quantised and layerwise-cast weights are stored in another dtype."""
    asked = []
    monkeypatch.setattr("tokenmerge.default_method.fewest_tokens", lambda own: asked.append(own[:2]) or 64)
    unet = hosts.unet()
    for name, weight in unet.named_parameters():
        weight.requires_grad_(False)
        weight.data = weight.data.to(norms if "norm" in name else stored)
    settings_for(pipeline(unet=unet))
    assert asked == [(torch.device("cpu"), timed)]


def test_weights_that_stay_in_float32_do_not_decide_the_dtype(monkeypatch):
    """Wan keeps its first weights in float32. Merging pays there much sooner than in half precision."""
    asked = []
    monkeypatch.setattr("tokenmerge.default_method.fewest_tokens", lambda own: asked.append(own[1]) or 64)
    model = FAMILIES["WanTransformer3DModel"].build()
    kept = set(model._keep_in_fp32_modules)
    for name, weight in model.requires_grad_(False).named_parameters():
        weight.data = weight.data.to(torch.float32 if kept & set(name.split(".")) else torch.float16)
    assert next(model.parameters()).dtype == torch.float32
    settings_for(pipeline(transformer=model))
    assert asked == [torch.float16]


def test_grids_are_timed_where_an_offloaded_model_runs(monkeypatch):
    asked = []
    monkeypatch.setattr("tokenmerge.default_method.fewest_tokens", lambda own: asked.append(own[0]) or 64)
    settings_for(pipeline(unet=hosts.unet(), _execution_device=torch.device("cuda:0")))
    assert asked == [torch.device("cuda:0")]


def test_a_measurement_is_kept_for_three_months_or_for_a_week_if_nothing_gains(monkeypatch):
    """A device on which merging never pays is not timed at each patching.

    But a machine that is busy for a moment must not decide for ever.
    """
    never, day = (2 * calibration.SIDES[-1]) ** 2, 24 * 3600
    found, now = iter([never, never, 256, 576]), [1.8e9]
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: next(found))
    monkeypatch.setattr(calibration.time, "time", lambda: now[0])
    assert [calibration.fewest_tokens(Attention(MPS, torch.float32)) for _ in range(3)] == [never] * 3
    now[0] -= day  # a clock that was set back: the measurement may be of any age
    assert calibration.fewest_tokens(Attention(MPS, torch.float32)) == never
    now[0] += 6 * day
    assert calibration.fewest_tokens(Attention(MPS, torch.float32)) == never
    now[0] += 2 * day
    assert calibration.fewest_tokens(Attention(MPS, torch.float32)) == 256
    now[0] += 90 * day
    assert calibration.fewest_tokens(Attention(MPS, torch.float32)) == 256
    now[0] += 2 * day
    assert calibration.fewest_tokens(Attention(MPS, torch.float32)) == 576


def test_merging_has_to_pay_on_all_larger_grids_too(monkeypatch):
    """On small grids, launching kernels takes the time. Only CUDA is fast enough for the largest ones."""
    timed, paying = [], {48, 96}

    def pays(attention: Attention, side: int) -> bool:
        timed.append(side)
        if side == 128:
            raise torch.OutOfMemoryError
        return side in paying

    monkeypatch.setattr(calibration, "_pays", pays)
    cuda = torch.device("cuda")
    assert calibration.measure_fewest_tokens(Attention(cuda, torch.float16)) == 96 * 96
    assert timed == [128, 96, 64]
    paying.clear()
    assert calibration.measure_fewest_tokens(Attention(cuda, torch.float16)) == 256 * 256
    timed.clear()
    paying.add(64)
    assert calibration.measure_fewest_tokens(Attention(MPS, torch.float16)) == 64 * 64
    assert timed == [64, 48]


def test_a_cpu_is_never_timed(monkeypatch):
    """Otherwise, what else the machine does would change the picture."""
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: pytest.fail("timed"))
    cpu = torch.device("cpu")
    assert calibration.fewest_tokens(Attention(cpu, torch.float32)) == calibration.TOKENS_ON_CPU


def test_measuring_draws_nothing_from_the_global_generator(monkeypatch):
    monkeypatch.setattr(calibration, "SIDES", (8,))
    before = torch.get_rng_state()
    calibration.measure_fewest_tokens(Attention(torch.device("cpu"), torch.float32, 2, 64, 4))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("merged", "plan", "blocks", "expected"),
    [
        ([2], 0, 1, 32 * 32),
        ([1, 1], 0, 1, 8 * 8),
        ([1, 2], 0, 1, 16 * 16),
        ([0.8], 1, 1, 32 * 32),  # each block makes a plan
        ([0.8, 2], 1, 8, 16 * 16),
        ([1.3], 0, 1, 32 * 32),  # 13 % faster, but 34 % of the operations are saved
    ],
)
def test_the_fewest_tokens_are_those_from_which_merging_pays(merged, plan, blocks, expected, monkeypatch):
    """With given times of a plan, merged and dense attention, on the largest grid first.

    Blocks share the time of a plan.
    """
    times = iter([time for side in merged for time in (plan, side, 1.5)])
    monkeypatch.setattr(calibration, "_seconds", lambda *_: next(times))
    monkeypatch.setattr(calibration, "SIDES", (8, 16))
    cpu = torch.device("cpu")
    assert calibration.measure_fewest_tokens(Attention(cpu, torch.float32, 1, 16, 1, blocks)) == expected
    assert not [*times]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_short_calls_are_timed_many_at_a_time_with_one_wait(device, monkeypatch):
    """As in a generation, which queues calls. Long calls are timed one at a time."""
    clock, calls, waits = [0.0], [], []
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(calibration.torch.accelerator, "synchronize", lambda device: waits.append(len(calls)))

    def function() -> None:
        calls.append(clock[0])
        clock[0] += took

    for took, number in ((0.0011, 9), (0.5, 1)):
        calls.clear()
        waits.clear()
        assert calibration._seconds(function, torch.device(device)) == pytest.approx(took)
        after = [1, 2, *(2 + number * i for i in range(1, calibration._ROUNDS + 1))]
        assert len(calls) == after[-1]
        assert waits == (after if device == "cuda" else [])


def test_the_fewest_tokens_are_timed_with_all_that_auto_adds_to_a_merged_step(monkeypatch):
    """Sizes in attention, and the correction, which merges what a dense step changed."""
    masks, merges = [], []
    attend, merge = calibration.F.scaled_dot_product_attention, IndexPlan.merge

    def noted(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        masks.append(mask is not None)
        return attend(q, k, v, mask)

    monkeypatch.setattr(calibration.F, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(IndexPlan, "merge", lambda plan, x: merges.append(x) or merge(plan, x))
    monkeypatch.setattr(calibration, "SIDES", (8,))
    monkeypatch.setattr(calibration, "_seconds", lambda function, device: function() is None)
    calibration.measure_fewest_tokens(Attention(torch.device("cpu"), torch.float32, 2, 64, 4))
    assert masks == [False, True, False]  # what a dense step changed, merged, dense
    assert len(merges) == 2
    assert not torch.equal(*merges)


def test_it_is_measured_once_for_a_device_and_kept(own_cache, monkeypatch):
    measured = []

    def measure(about: Attention) -> int:
        measured.append(about)
        return 64 * len(measured)

    monkeypatch.setattr(calibration, "measure_fewest_tokens", measure)
    for _ in range(2):
        assert calibration.fewest_tokens(Attention(MPS, torch.float32)) == 64
    assert calibration.fewest_tokens(Attention(MPS, torch.bfloat16)) == 128
    shapes = ((2, 64, 4), (1, 64, 4), (1, 64, 4, 5))
    for tokens, shape in zip((192, 256, 320), shapes, strict=True):
        assert calibration.fewest_tokens(Attention(MPS, torch.bfloat16, *shape)) == tokens
    assert [about[2:] for about in measured[2:]] == [(2, 64, 4, 1), (1, 64, 4, 1), (1, 64, 4, 5)]
    file = own_cache / "tokenmerge" / "fewest_tokens.json"
    assert calibration.cache_file() == file
    assert [tokens for tokens, _ in json.loads(file.read_text()).values()] == [64, 128, 192, 256, 320]
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    (key, *_) = json.loads(file.read_text())
    values = (64, ["many", 1], None, [64], [64, 1, 1])
    wrong = [json.dumps({key: value}) for value in values]
    for times, text in enumerate(('{"cut off', "[1]", "3", "[" * 100_000, *wrong)):
        file.write_text(text)
        assert calibration.fewest_tokens(Attention(MPS, torch.float32)) == 384 + 64 * times


def test_a_folder_that_cannot_be_written_is_no_matter(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: 256)
    assert calibration.fewest_tokens(Attention(MPS, torch.float32)) == 256


@pytest.mark.parametrize("failing", ["home", "disk"])
def test_a_cache_that_fails_is_no_matter(failing, own_cache, monkeypatch):
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: 256)

    def fail(*_: Any) -> None:
        raise RuntimeError

    def half(file: Path, text: str, **_: Any) -> None:
        file.write_bytes(text[: len(text) // 2].encode())
        raise OSError(28, "No space left on device")

    if failing == "disk":
        monkeypatch.setattr(calibration.Path, "write_text", half)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("LOCALAPPDATA", raising=False)
        monkeypatch.setattr(calibration.Path, "home", fail)
        monkeypatch.setattr(calibration.tempfile, "gettempdir", lambda: str(own_cache))
    assert calibration.fewest_tokens(Attention(MPS, torch.float32)) == 256
    assert calibration.fewest_tokens(Attention(MPS, torch.float32)) == 256
    assert not [path for path in own_cache.rglob("*") if path.is_file()]


def test_without_a_home_folder_each_process_measures_once(own_cache, monkeypatch):
    """A folder for temporary files is everybody's, and others may have put a link there."""
    measured = iter([256])

    def fail() -> None:
        raise RuntimeError

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(calibration.Path, "home", fail)
    monkeypatch.setattr(calibration.tempfile, "gettempdir", lambda: str(own_cache))
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: next(measured))
    monkeypatch.setattr(calibration, "_of_process", {})
    assert calibration.cache_file() is None
    assert [calibration.fewest_tokens(Attention(MPS, torch.float32)) for _ in range(2)] == [256, 256]
    assert not [*own_cache.iterdir()]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_in_place_of_the_file_is_replaced(monkeypatch):
    file = calibration.cache_file()
    file.parent.mkdir()
    os.mkfifo(file)
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: 256)
    done = []
    thread = threading.Thread(
        target=lambda: done.append(calibration.fewest_tokens(Attention(MPS, torch.float32))), daemon=True
    )
    thread.start()
    thread.join(20)
    assert done == [256]
    assert [tokens for tokens, _ in json.loads(file.read_text()).values()] == [256]


def test_what_others_measure_at_the_same_time_is_kept(own_cache, monkeypatch):
    """Each of several writers adds its measurement to those of the others."""
    others = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    barrier = threading.Barrier(len(others))

    def measure(about: Attention) -> int:
        barrier.wait(20)  # all have read the file, which is empty
        return 256

    monkeypatch.setattr(calibration, "measure_fewest_tokens", measure)
    threads = [
        threading.Thread(target=calibration.fewest_tokens, args=[Attention(MPS, dtype)]) for dtype in others
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file = own_cache / "tokenmerge" / "fewest_tokens.json"
    assert len(json.loads(file.read_text())) == len(others)


def test_measuring_takes_seconds():
    start = time.process_time()
    sides = {48**2, 64**2, 256**2}
    assert calibration.measure_fewest_tokens(Attention(torch.device("cpu"), torch.float32, 2, 64, 4)) in sides
    assert time.process_time() - start < 20  # also on a busy machine, since its waiting is not counted


@pytest.mark.parametrize("whole", [True, False], ids=["pipeline", "model alone"])
def test_the_narrowest_attention_decides(whole, monkeypatch):
    """In a pipeline its blocks share plans, those on the way down and those on the way up."""
    asked = []
    monkeypatch.setattr("tokenmerge.default_method.fewest_tokens", lambda own: asked.append(own[2:]) or 64)
    unet = hosts.unet(layers_per_block=2)
    settings_for(pipeline(unet=unet) if whole else unet)
    down, up = unet.down_blocks[0].attentions, unet.up_blocks[-1].attentions
    attention = down[0].transformer_blocks[0].attn1
    sharing = (len(down) + len(up)) // 2
    assert sharing > 1
    assert asked == [(2, attention.to_q.out_features, attention.heads, sharing if whole else 1)]


def test_plans_are_counted_in_the_narrowest_attention():
    narrow, wide = (64, 4), (128, 4)
    found = [*[(narrow, "down")] * 2, *[(narrow, "up")] * 3, *[(wide, "middle")] * 9]
    assert narrowest(found) == (*narrow, 2)
    assert narrowest([]) == ()


def test_a_model_that_takes_its_guidance_is_timed_with_one_picture(monkeypatch):
    """All of its blocks share a plan."""
    asked = []
    monkeypatch.setattr("tokenmerge.default_method.fewest_tokens", lambda own: asked.append(own[2:]) or 64)
    flux = FAMILIES["FluxTransformer2DModel"].build()
    settings_for(pipeline(transformer=flux))
    blocks = len(flux.transformer_blocks) + len(flux.single_transformer_blocks)
    attention = flux.transformer_blocks[0].attn
    assert asked == [(1, attention.to_q.out_features, attention.heads, blocks)]
