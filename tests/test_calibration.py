"""The timing of attention, which says from which number of tokens on merging is faster."""

from __future__ import annotations

import itertools
import json
import os
import platform
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import hosts
import pytest
import torch
from tests.models.tiny import FAMILIES

from tokenmerge import calibration
from tokenmerge.calibration import TimedMerging
from tokenmerge.default_method import settings_for
from tokenmerge.models.placement import narrowest
from tokenmerge.ops import sized_attention
from tokenmerge.ops.plan import MergePlan
from tokenmerge.ops.sized_attention import Bias
from tokenmerge.planners import PLANNERS
from tokenmerge.plans import FewestTokens, fewest_at, pays_from

CPU = torch.device("cpu")
MPS = torch.device("mps")  # another device than a CPU; it need not be there


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def tokens_of(merging: TimedMerging) -> tuple[int, ...]:
    """The fewest tokens for each ratio that is timed."""
    found = calibration.fewest_tokens(merging)
    assert [own[:2] for own in found] == [
        (merging.scope, ratio) for ratio in calibration.RATIOS[merging.scope]
    ]
    return tuple(own.tokens for own in found)


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
    monkeypatch.setattr(
        "tokenmerge.default_method.fewest_tokens", lambda own: asked.append(own[:2]) or pays_from(64)
    )
    unet = hosts.unet()
    for name, weight in unet.named_parameters():
        weight.requires_grad_(False)
        weight.data = weight.data.to(norms if "norm" in name else stored)
    settings_for(pipeline(unet=unet))
    assert asked == [(torch.device("cpu"), timed)]


def test_weights_that_stay_in_float32_do_not_decide_the_dtype(monkeypatch):
    """Wan keeps its first weights in float32. Merging pays there much sooner than in half precision."""
    asked = []
    monkeypatch.setattr(
        "tokenmerge.default_method.fewest_tokens", lambda own: asked.append(own[1]) or pays_from(64)
    )
    model = FAMILIES["WanTransformer3DModel"].build()
    kept = set(model._keep_in_fp32_modules)
    for name, weight in model.requires_grad_(False).named_parameters():
        weight.data = weight.data.to(torch.float32 if kept & set(name.split(".")) else torch.float16)
    assert next(model.parameters()).dtype == torch.float32
    settings_for(pipeline(transformer=model))
    assert asked == [torch.float16]


def test_grids_are_timed_where_an_offloaded_model_runs(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "tokenmerge.default_method.fewest_tokens", lambda own: asked.append(own[0]) or pays_from(64)
    )
    settings_for(pipeline(unet=hosts.unet(), _execution_device=torch.device("cuda:0")))
    assert asked == [torch.device("cuda:0")]


def test_a_measurement_is_kept_for_three_months_or_for_a_week_if_nothing_gains(monkeypatch):
    """A device on which merging never pays is not timed at each patching.

    But a machine that is busy for a moment must not decide for ever.
    """
    never, day = (2 * calibration.SIDES[-1]) ** 2, 24 * 3600
    found, now = iter([(never, 64), (never, 64), (256, 256), (576, 256)]), [1.8e9]
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: next(found))
    monkeypatch.setattr(calibration.time, "time", lambda: now[0])
    merging = TimedMerging(MPS, torch.float32)
    assert [tokens_of(merging) for _ in range(3)] == [(never, 64)] * 3
    now[0] -= day  # a clock that was set back: the measurement may be of any age
    assert tokens_of(merging) == (never, 64)
    now[0] += 6 * day
    assert tokens_of(merging) == (never, 64)
    now[0] += 2 * day
    assert tokens_of(merging) == (256, 256)
    now[0] += 90 * day
    assert tokens_of(merging) == (256, 256)
    now[0] += 2 * day
    assert tokens_of(merging) == (576, 256)


def test_a_grid_a_ratio_or_a_scope_with_which_merging_does_not_pay_refuses_no_other(monkeypatch):
    """The smallest grid counts on which it pays. Only CUDA is fast enough for the largest ones."""
    timed, paying = [], {("block", 0.2): (64,), ("block", 0.5): (48, 96), ("layers", 0.5): (128,)}

    def pays(merging: TimedMerging, side: int, ratio: float) -> bool:
        timed.append(side)
        if side == 96:
            raise torch.OutOfMemoryError
        return side in paying.get((merging.scope, ratio), ())

    monkeypatch.setattr(calibration, "_pays", pays)
    stack = TimedMerging(torch.device("cuda"), torch.float16, scope="block")
    assert calibration.measure_fewest_tokens(stack) == (256 * 256, 64 * 64, 48 * 48)
    assert timed == [32, 48, 64, 96, 128, 32, 48, 64, 32, 48]
    layers = stack._replace(scope="layers")
    assert calibration.measure_fewest_tokens(layers) == (256 * 256, 128 * 128)
    timed.clear()
    assert calibration.measure_fewest_tokens(layers._replace(device=MPS)) == (256 * 256, 256 * 256)
    assert timed == [32, 48, 64] * 2


def test_a_cpu_is_never_timed(monkeypatch):
    """Otherwise, what else the machine does would change the image."""
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: pytest.fail("timed"))
    merging = [TimedMerging(CPU, torch.float32, scope=scope) for scope in ("block", "layers")]
    found = calibration.fewest_tokens(*merging)
    for own, ratio in itertools.product(merging, (0.1, 0.2, 0.5, 0.75)):
        assert fewest_at(found, own.scope, ratio) == calibration.TOKENS_ON_CPU


@pytest.mark.parametrize("scope", ["block", "layers"])
def test_measuring_draws_nothing_from_the_global_generator(scope, monkeypatch):
    monkeypatch.setattr(calibration, "SIDES", (8,))
    before = torch.get_rng_state()
    calibration.measure_fewest_tokens(TimedMerging(CPU, torch.float32, scope, False, 2, 64, 4))
    assert torch.equal(torch.get_rng_state(), before)


LAYERS = TimedMerging(CPU, torch.float32, "layers", False, 1, 16, 1)
STACK = LAYERS._replace(scope="block")


@pytest.mark.parametrize(
    ("merging", "ratio", "times", "pays"),
    [
        # Dense, and a layer with its plan: at 0.2, 34 % of the operations are saved, and at 0.5, 72 %.
        (LAYERS, 0.2, (1.5, 1.2), True),
        (LAYERS, 0.2, (1.5, 1.3), False),
        (LAYERS, 0.5, (1.5, 1.2), False),
        (LAYERS, 0.5, (1.5, 0.9), True),
        # Another layer, which uses the plan of the first.
        (LAYERS._replace(blocks=8), 0.2, (1.5, 2.0, 1.1), True),
        (LAYERS._replace(blocks=2), 0.2, (1.5, 2.0, 1.1), False),
        # Dense, what is done once for a stack, and a block on merged tokens: 32 % and 68 %.
        (STACK, 0.2, (1.5, 0.9, 1.1), False),
        (STACK._replace(blocks=8), 0.2, (1.5, 0.9, 1.1), True),
        (STACK._replace(blocks=8), 0.2, (1.5, 1.2, 1.1), True),
        (STACK._replace(blocks=8), 0.2, (1.5, 1.4, 1.1), False),
        (STACK._replace(blocks=8), 0.5, (1.5, 0.9, 1.1), False),
        (STACK._replace(blocks=8), 0.5, (1.5, 0.9, 0.8), True),
    ],
)
def test_merging_pays_where_it_saves_half_as_large_a_part_of_the_time_as_of_the_operations(
    merging, ratio, times, pays, monkeypatch
):
    """With given times of the parts, on 256 tokens. Blocks share the time of a plan."""
    left = iter(times)
    monkeypatch.setattr(calibration, "_seconds", lambda *_: next(left))
    assert calibration._pays(merging, 16, ratio) == pays
    assert not [*left]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_short_calls_are_timed_many_at_a_time_with_one_wait(device, monkeypatch):
    """As in a generation, which queues calls. Long calls are timed one at a time, and less often."""
    clock, calls, waits = [0.0], [], []
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(calibration.torch.accelerator, "synchronize", lambda device: waits.append(len(calls)))

    def function() -> None:
        calls.append(clock[0])
        clock[0] += took

    for took, number, rounds in ((0.0011, 9, calibration._ROUNDS), (0.035, 1, 2), (0.5, 1, 1)):
        calls.clear()
        waits.clear()
        assert calibration._seconds(function, torch.device(device)) == pytest.approx(took)
        after = [1, 2, *(2 + number * i for i in range(1, rounds + 1))]
        assert len(calls) == after[-1]
        assert waits == (after if device == "cuda" else [])


class Done(NamedTuple):
    """What one part does that is timed."""

    plans: int
    merges: int
    unmerges: int
    masks: list[bool]  # for each attention, whether it has a mask


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[Done]:
    """The parts that are timed, of which each runs once."""
    done, merged, masks = [], [], []
    counts = {"plan": 0, "unmerge": 0}
    attend, make_plan = calibration.F.scaled_dot_product_attention, PLANNERS["tiled"]
    merge, unmerge = MergePlan.merge, MergePlan.unmerge

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        return call

    def noted(query: Any, key: Any, value: Any, mask: Any = None, **more: Any) -> Any:
        masks.append(mask is not None)
        return attend(query, key, value, mask, **more)

    def seconds(function: Any, device: Any) -> float:
        counts.update(plan=0, unmerge=0)
        merged.clear()
        masks.clear()
        function()
        done.append(Done(counts["plan"], len(merged), counts["unmerge"], [*masks]))
        for one, other in itertools.combinations(merged, 2):
            assert not torch.equal(one, other)
        return 1.0

    monkeypatch.setitem(PLANNERS, "tiled", counted("plan", make_plan))
    monkeypatch.setattr(MergePlan, "unmerge", counted("unmerge", unmerge))
    monkeypatch.setattr(MergePlan, "merge", lambda plan, x: merged.append(x) or merge(plan, x))
    monkeypatch.setattr(calibration.F, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(calibration, "_seconds", seconds)
    return done


DENSE = Done(0, 0, 0, [False])


def test_layers_are_timed_with_all_that_the_default_method_adds(parts):
    """Sizes in attention, and the correction, which merges what a dense step changed."""
    calibration._pays(LAYERS._replace(blocks=5), 8, 0.5)
    assert parts == [DENSE, Done(1, 2, 2, [True]), Done(0, 2, 2, [True])]
    parts.clear()
    calibration._pays(LAYERS, 8, 0.5)
    assert parts == [DENSE, Done(1, 2, 2, [True])]


def test_a_stack_is_timed_with_one_plan_for_all_blocks(parts):
    """It merges and corrects once: blocks see merged tokens and their sizes, and nothing else."""
    calibration._pays(STACK._replace(blocks=5), 8, 0.5)
    assert parts == [DENSE, Done(1, 2, 1, []), Done(0, 0, 0, [True])]


@pytest.mark.parametrize("way", [Bias.MASK, Bias.COLUMNS, Bias.FLEX, Bias.GROUPS])
def test_attention_on_merged_tokens_has_the_bias_that_is_chosen(way, parts, monkeypatch):
    asked, ways = [], {Bias.FLEX: "attend_by_flex", Bias.GROUPS: "attend_by_groups"}
    if way in ways:  # they are exact elsewhere, and slow here
        monkeypatch.setattr(sized_attention, ways[way], lambda query, *_: asked.append(way) or query)

    def choose(*about: Any, has_mask: bool) -> Bias:
        asked.append((*about, has_mask))
        return way

    monkeypatch.setattr(calibration, "choose_bias", choose)
    calibration._pays(STACK._replace(channels=32, heads=2), 8, 0.5)
    assert asked == [("cpu", torch.float32, 16, 32, False), *([way] if way in ways else [])]
    assert parts[-1].masks == {Bias.MASK: [True], Bias.COLUMNS: [False]}.get(way, [])


def test_attention_in_comfyui_has_a_mask():
    """Where other attention of this kind has columns."""
    merging = TimedMerging(torch.device("cuda"), torch.float16, "layers", False, 2, 320, 8)
    assert merging.bias(8192) is Bias.COLUMNS
    assert merging._replace(has_mask=True).bias(8192) is Bias.MASK


def test_it_is_measured_once_for_all_that_is_timed_and_kept(own_cache, monkeypatch):
    measured = []

    def measure(merging: TimedMerging) -> tuple[int, ...]:
        measured.append(merging)
        return tuple(size * len(measured) for size in sizes[merging.scope])

    monkeypatch.setattr(calibration, "measure_fewest_tokens", measure)
    monkeypatch.setattr(calibration, "choose_bias", lambda *_, has_mask: biases[-1])
    biases = [Bias.MASK]
    sizes = {"layers": (64, 32), "block": (96, 64, 32)}
    first = TimedMerging(MPS, torch.float32, "layers", False, 2, 64, 4)
    others = [
        first._replace(**change)
        for change in (
            {"dtype": torch.bfloat16},
            {"batch": 1},
            {"channels": 128},
            {"heads": 8},
            {"blocks": 5},
            {"scope": "block"},
        )
    ]
    for merging in (first, *others, first, *others):
        tokens_of(merging)
    assert measured == [first, *others]
    assert calibration.fewest_tokens(first, others[5]) == (
        *[FewestTokens("layers", 0.2, 64), FewestTokens("layers", 0.5, 32)],
        *[FewestTokens("block", 0.1, 7 * 96), FewestTokens("block", 0.2, 7 * 64)],
        FewestTokens("block", 0.5, 7 * 32),
    )
    biases.append(Bias.COLUMNS)
    tokens_of(first)
    assert len(measured) == 8
    file = own_cache / "tokenmerge" / "fewest_tokens.json"
    assert calibration.cache_file() == file
    kept = [tokens for tokens, _ in json.loads(file.read_text()).values()]
    scopes = ["layers"] * 6 + ["block", "layers"]
    expected = [number * size for number, scope in enumerate(scopes, 1) for size in sizes[scope]]
    assert kept == expected
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_damaged_file_is_read_as_an_empty_one(own_cache, monkeypatch):
    measured = []
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda own: measured.append(own) or (64, 32))
    merging = TimedMerging(MPS, torch.float32)
    tokens_of(merging)
    file = calibration.cache_file()
    key, other = json.loads(file.read_text())
    values = (64, ["many", 1], None, [64], [64, 1, 1])
    wrong = [json.dumps({key: value, other: [32, int(time.time())]}) for value in values]
    for times, text in enumerate(('{"cut off', "[1]", "3", "[" * 100_000, *wrong)):
        file.write_text(text)
        assert tokens_of(merging) == (64, 32)
        assert len(measured) == times + 2


def test_what_an_earlier_version_measured_is_not_taken_and_stays(own_cache, monkeypatch):
    """That version keeps it in the same file."""
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: (64, 32))
    merging = TimedMerging(MPS, torch.float32)
    file, now = calibration.cache_file(), int(time.time())
    machine = f"mps {platform.machine()}, float32, torch {torch.__version__}"
    earlier = f"{machine}, batch 2, 8 × 80 channels, 1 blocks a plan, proportional, corrected, 0.2, 0.5"
    file.parent.mkdir()
    file.write_text(json.dumps({earlier: [4096, now]}))
    assert tokens_of(merging) == (64, 32)
    kept = json.loads(file.read_text())
    assert kept.pop(earlier) == [4096, now]
    assert [tokens for tokens, _ in kept.values()] == [64, 32]


def test_a_folder_that_cannot_be_written_is_no_matter(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: (256, 64))
    assert tokens_of(TimedMerging(MPS, torch.float32)) == (256, 64)


@pytest.mark.parametrize("failing", ["home", "disk"])
def test_a_cache_that_fails_is_no_matter(failing, own_cache, monkeypatch):
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: (256, 64))

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
    assert tokens_of(TimedMerging(MPS, torch.float32)) == (256, 64)
    assert tokens_of(TimedMerging(MPS, torch.float32)) == (256, 64)
    assert not [path for path in own_cache.rglob("*") if path.is_file()]


def test_without_a_home_folder_each_process_measures_once(own_cache, monkeypatch):
    """A folder for temporary files is everybody's, and others may have put a link there."""
    measured = iter([(256, 64)])

    def fail() -> None:
        raise RuntimeError

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(calibration.Path, "home", fail)
    monkeypatch.setattr(calibration.tempfile, "gettempdir", lambda: str(own_cache))
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: next(measured))
    monkeypatch.setattr(calibration, "_of_process", {})
    assert calibration.cache_file() is None
    assert [tokens_of(TimedMerging(MPS, torch.float32)) for _ in range(2)] == [(256, 64)] * 2
    assert not [*own_cache.iterdir()]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_in_place_of_the_file_is_replaced(monkeypatch):
    file = calibration.cache_file()
    file.parent.mkdir()
    os.mkfifo(file)
    monkeypatch.setattr(calibration, "measure_fewest_tokens", lambda *_: (256, 64))
    done = []
    thread = threading.Thread(
        target=lambda: done.append(tokens_of(TimedMerging(MPS, torch.float32))), daemon=True
    )
    thread.start()
    thread.join(20)
    assert done == [(256, 64)]
    assert [tokens for tokens, _ in json.loads(file.read_text()).values()] == [256, 64]


def test_what_others_measure_at_the_same_time_is_kept(own_cache, monkeypatch):
    """Each of several writers adds its measurement to those of the others."""
    others = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    barrier = threading.Barrier(len(others))

    def measure(merging: TimedMerging) -> tuple[int, int]:
        barrier.wait(20)  # all have read the file, which is empty
        return 256, 64

    monkeypatch.setattr(calibration, "measure_fewest_tokens", measure)
    threads = [threading.Thread(target=tokens_of, args=[TimedMerging(MPS, dtype)]) for dtype in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file = own_cache / "tokenmerge" / "fewest_tokens.json"
    assert len(json.loads(file.read_text())) == 2 * len(others)


@pytest.mark.parametrize("scope", ["block", "layers"])
def test_measuring_takes_seconds(scope):
    start = time.process_time()
    merging = TimedMerging(CPU, torch.float32, scope, False, 2, 64, 4, 3)
    assert {*calibration.measure_fewest_tokens(merging)} <= {32**2, 48**2, 64**2, 256**2}
    assert time.process_time() - start < 20  # also on a busy machine, since its waiting is not counted


@pytest.mark.parametrize("whole", [True, False], ids=["pipeline", "model alone"])
def test_the_narrowest_attention_decides(whole, monkeypatch):
    """In a pipeline its blocks share plans, those on the way down and those on the way up."""
    asked = []
    monkeypatch.setattr(
        "tokenmerge.default_method.fewest_tokens", lambda own: asked.append(own[2:]) or pays_from(64)
    )
    unet = hosts.unet(layers_per_block=2)
    settings_for(pipeline(unet=unet) if whole else unet)
    down, up = unet.down_blocks[0].attentions, unet.up_blocks[-1].attentions
    attention = down[0].transformer_blocks[0].attn1
    sharing = (len(down) + len(up)) // 2
    assert sharing > 1
    shared = sharing if whole else 1
    assert asked == [("layers", False, 2, attention.to_q.out_features, attention.heads, shared)]


def test_plans_are_counted_in_the_narrowest_attention():
    narrow, wide = (64, 4), (128, 4)
    found = [*[(narrow, "down")] * 2, *[(narrow, "up")] * 3, *[(wide, "middle")] * 9]
    assert narrowest(found) == (*narrow, 2)
    assert narrowest([]) == ()


def test_a_model_that_takes_its_guidance_is_timed_with_one_picture(monkeypatch):
    """All of its blocks are a stack."""
    asked = []
    monkeypatch.setattr(
        "tokenmerge.default_method.fewest_tokens", lambda own: asked.append(own[2:]) or pays_from(64)
    )
    flux = FAMILIES["FluxTransformer2DModel"].build()
    settings_for(pipeline(transformer=flux))
    blocks = len(flux.transformer_blocks) + len(flux.single_transformer_blocks)
    attention = flux.transformer_blocks[0].attn
    assert asked == [("block", False, 1, attention.to_q.out_features, attention.heads, blocks)]


@pytest.mark.parametrize("alone", [True, False], ids=["model alone", "pipeline"])
def test_each_scope_is_timed_that_is_tried(alone, monkeypatch):
    """Where no step is known, each block merges by itself, or its attention does."""
    asked = []
    monkeypatch.setattr(
        "tokenmerge.default_method.fewest_tokens", lambda *own: asked.extend(own) or pays_from(64)
    )
    flux = FAMILIES["FluxTransformer2DModel"].build()
    settings_for(flux if alone else pipeline(transformer=flux), follows_steps=False)
    assert [(own.scope, own.blocks) for own in asked] == [("layers", 1), ("block", 1)]
