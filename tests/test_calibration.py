"""The timing of attention, which says from which number of tokens on merging is faster."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hosts
import pytest
import torch

from tokenmerge.default_method import settings_for
from tokenmerge.planners import calibration


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
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *shape: asked.append(shape[:2]) or 64)
    unet = hosts.unet()
    for name, weight in unet.named_parameters():
        weight.requires_grad_(False)
        weight.data = weight.data.to(norms if "norm" in name else stored)
    settings_for(pipeline(unet=unet))
    assert asked == [(torch.device("cpu"), timed)]


def test_grids_are_timed_where_an_offloaded_model_runs(monkeypatch):
    asked = []
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *shape: asked.append(shape[0]) or 64)
    monkeypatch.setattr(calibration, "_key", lambda device, dtype: str(device))  # it need not be there
    settings_for(pipeline(unet=hosts.unet(), _execution_device=torch.device("cuda:0")))
    assert asked == [torch.device("cuda:0")]


def test_a_measurement_in_which_nothing_gains_is_not_kept(monkeypatch, tmp_path):
    """A machine that is busy for a moment must not keep models dense for ever."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = iter([(2 * calibration.SIDES[-1]) ** 2, 256])
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: next(found))
    device = torch.device("cpu")
    assert [calibration.fewest_tokens(device, torch.float32) for _ in range(3)] == [128**2, 256, 256]


def test_measuring_draws_nothing_from_the_global_generator(monkeypatch):
    monkeypatch.setattr(calibration, "SIDES", (8,))
    before = torch.get_rng_state()
    calibration.measure_fewest_tokens(torch.device("cpu"), torch.float32, 64, 4)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("slow", "expected"), [("merged", 128 * 128), ("dense", 64), ("small", 16 * 16)])
def test_the_fewest_tokens_are_those_from_which_merging_is_faster(slow, expected, monkeypatch):
    """With given times: merged and dense in turn, of the first grid, the second one, and so on."""
    sides = iter([side for side in calibration.SIDES for _ in range(2)])
    turn = iter(range(100))

    def seconds(function: Any, device: torch.device) -> float:
        side, merged = next(sides), next(turn) % 2 == 0
        worse = {"merged": True, "dense": False, "small": side < 16}[slow]
        return 2.0 if merged == worse else 1.0

    monkeypatch.setattr(calibration, "_seconds", seconds)
    assert calibration.measure_fewest_tokens(torch.device("cpu"), torch.float32) == expected


def test_the_fewest_tokens_are_timed_with_all_that_auto_adds_to_a_merged_step(monkeypatch):
    """Sizes in attention, and the correction, which merges what a dense step changed."""
    masks, merges = [], []
    attend, merge = calibration.F.scaled_dot_product_attention, calibration.merge

    def noted(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        masks.append(mask is not None)
        return attend(q, k, v, mask)

    monkeypatch.setattr(calibration.F, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(calibration, "merge", lambda plan, x: merges.append(x) or merge(plan, x))
    monkeypatch.setattr(calibration, "SIDES", (8,))
    monkeypatch.setattr(calibration, "_seconds", lambda function, device: function() is None)
    calibration.measure_fewest_tokens(torch.device("cpu"), torch.float32, 64, 4)
    assert masks == [False, True, False]  # what a dense step changed, merged, dense
    assert len(merges) == 2
    assert not torch.equal(*merges)


def test_it_is_measured_once_for_a_device_and_kept(own_cache, monkeypatch):
    cpu, measured = torch.device("cpu"), []

    def measure(device: torch.device, dtype: torch.dtype, channels: int, heads: int) -> int:
        measured.append((dtype, channels, heads))
        return 64 * len(measured)

    monkeypatch.setattr(calibration, "measure_fewest_tokens", measure)
    for _ in range(2):
        assert calibration.fewest_tokens(cpu, torch.float32) == 64
    assert calibration.fewest_tokens(cpu, torch.bfloat16) == 128
    assert calibration.fewest_tokens(cpu, torch.bfloat16, 64, 4) == 192
    file = own_cache / "tokenmerge" / "fewest_tokens.json"
    assert calibration.cache_file() == file
    assert list(json.loads(file.read_text()).values()) == [64, 128, 192]
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    (key, *_) = json.loads(file.read_text())
    wrong = [json.dumps({key: value}) for value in (-5, 0, True, 64.0, "64", None, [64])]
    for times, text in enumerate(('{"cut off', "[1]", "3", "[" * 100_000, *wrong)):
        file.write_text(text)
        assert calibration.fewest_tokens(cpu, torch.float32) == 256 + 64 * times


def test_a_folder_that_cannot_be_written_is_no_matter(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: 256)
    assert calibration.fewest_tokens(torch.device("cpu"), torch.float32) == 256


@pytest.mark.parametrize("failing", ["home", "disk"])
def test_a_cache_that_fails_is_no_matter_and_leaves_nothing(failing, own_cache, monkeypatch):
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
    assert calibration.fewest_tokens(torch.device("cpu"), torch.float32) == 256
    left = [path.name for path in (own_cache / "tokenmerge").iterdir()]
    assert left == ([] if failing == "disk" else ["fewest_tokens.json"])


def test_measuring_takes_seconds():
    start = time.process_time()
    sides = {side**2 for side in (*calibration.SIDES, 2 * calibration.SIDES[-1])}
    assert calibration.measure_fewest_tokens(torch.device("cpu"), torch.float32) in sides
    assert time.process_time() - start < 60  # also on a busy machine, since its waiting is not counted


def test_the_narrowest_attention_decides(monkeypatch):
    asked = []
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *shape: asked.append(shape[2:]) or 64)
    unet = hosts.unet()
    settings_for(pipeline(unet=unet))
    attention = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    assert asked == [(attention.to_q.out_features, attention.heads)]
