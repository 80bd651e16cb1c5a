from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from tools.tests.evaluate.conftest import picture

from tokenmerge import ToMeConfig, token_merging
from tokenmerge.errors import ConfigError, NothingToMergeError
from tokenmerge_tools import timing
from tokenmerge_tools.closeness import psnr
from tokenmerge_tools.drawing import Studio
from tokenmerge_tools.evaluate import measure
from tokenmerge_tools.evaluate.distances import DISTANCES, distance
from tokenmerge_tools.evaluate.evaluation import parse_variants, plan_variants, weights_key
from tokenmerge_tools.evaluate.measure import Figures, Measured
from tokenmerge_tools.evaluate.networks import Vision
from tokenmerge_tools.pipelines.call import PipelineCall
from tokenmerge_tools.pipelines.loading import ModelSource, SourceKind
from tokenmerge_tools.records.file import RecordNotWrittenError, ResultsFile, read_results
from tokenmerge_tools.records.kinds import QualityRecord, SampleRecord
from tokenmerge_tools.reporting.tables import quality_tables
from tokenmerge_tools.sheets import as_tensor
from tokenmerge_tools.variants.variant import Variant

Run = Callable[..., list[QualityRecord]]
AUTO, AUTO_LABEL = "auto:speedup=1.5,min_tokens=64", "auto speedup=1.5 min_tokens=64"


def pictures(folder: Path) -> dict[str, np.ndarray]:
    """Every image by variant and name."""
    return {
        f"{path.parent.name}/{path.name}": np.asarray(Image.open(path), dtype=int)
        for path in sorted(folder.rglob("*.png"))
    }


def by_label(records: list[QualityRecord]) -> dict[str, QualityRecord]:
    return {record.label: record for record in records}


def test_figures_are_those_of_the_pictures_on_disk(run: Run, tmp_path: Path) -> None:
    records = by_label(run(ratio=(0.25, 0.5), seeds=2))
    assert list(records) == ["dense", "tome ratio=0.25", "tome ratio=0.5"]
    found = pictures(tmp_path / "results")
    assert len(found) == 3 * 3 * 2
    for label, record in records.items():
        assert record.images == 6
        if label == "dense":
            assert record.figures == {}
            continue
        own = {
            name.partition("/")[2]: p
            for name, p in found.items()
            if name.startswith(label.replace(" ", "-").replace("=", "-").replace(".", "-") + "-")
        }
        assert len(own) == 6
        one, two = (
            as_tensor([Image.fromarray(p.astype(np.uint8)) for p in batch])
            for batch in (list(own.values()), [found[f"dense/{name}"] for name in own])
        )
        assert record.figures["psnr"] == pytest.approx(float(psnr(one, two).double().mean()))
        assert 0 < record.figures["ssim"] < 1
    assert records["tome ratio=0.25"].figures["psnr"] > records["tome ratio=0.5"].figures["psnr"]


def test_methods_follow_the_steps_of_the_pipeline(run: Run) -> None:
    late = 'rules=[{"start": 0.2, "ratio": 0.0}]'
    variants = (
        f"tome:{late}",
        "tome:correction.every=2,scope=block",
        "ibtm",
        AUTO,
    )
    with pytest.warns(
        UserWarning, match=r"this generation is dense: by the rules .*nothing merges in any of 2 steps"
    ):
        records = by_label(run(variants=variants, limit=1))
    assert list(records)[1:] == [
        f"tome ratio=0.5 {late}",
        "tome ratio=0.5 scope=block correction.every=2",
        "ibtm ratio=0.5",
        AUTO_LABEL,
    ]
    # The first merges in neither of the two steps.
    assert any("equal dense in every pixel" in note for note in records[f"tome ratio=0.5 {late}"].notes)
    for label in list(records)[2:]:
        assert 0 < records[label].figures["psnr"] < 100


def test_a_steps_mask_of_cache_dit_is_warmed_up_and_drawn(run: Run) -> None:
    pytest.importorskip("cache_dit")
    changes = {"model": "emoji-mmdit", "size": (64, 64), "steps": 6, "batch": 1, "limit": 1}
    masked = by_label(run(**changes, variants=("cache-dit:mask=fast,threshold=1",)))
    assert masked["cache-dit mask=fast threshold=1"].images == 1


def test_settings_read_from_a_record_draw_the_same_picture(run: Run, models: Path, tmp_path: Path) -> None:
    run(variants=(AUTO, "tomesd"), steps=6, limit=1, batch=1)
    records = by_label(read_results([tmp_path / "results"]).quality)
    read = {label: record.config for label, record in records.items()}
    assert read["dense"] is None  # dense has no settings
    settings = ToMeConfig.from_dict(read[AUTO_LABEL])
    assert settings.planner == "tiled"  # auto chose it
    pipe = DiffusionPipeline.from_pretrained(models / "tiny")
    with token_merging(pipe, settings):
        again = pipe("red apple", num_inference_steps=6, generator=torch.Generator().manual_seed(0))
    drawn_then = {name.partition("-")[0]: picture for name, picture in pictures(tmp_path / "results").items()}
    assert np.array_equal(np.asarray(again.images[0], dtype=int), drawn_then["auto"])
    assert not np.array_equal(drawn_then["dense/red"], drawn_then["auto"])


def test_a_note_tells_of_pictures_with_different_settings(run: Run, tmp_path: Path, monkeypatch) -> None:
    run(variants=(AUTO,), limit=1)
    # Another seed is drawn later, by an auto that chooses other settings.
    chosen = dataclasses.replace(ToMeConfig(ratio=0.5), planner="tome")
    monkeypatch.setattr(Variant, "config", lambda *_, **facts: chosen)
    record = by_label(run(variants=(AUTO,), limit=1, seeds=2))[AUTO_LABEL]
    assert record.config is None
    assert any("drawn with 2 different settings" in note for note in record.notes)


def test_no_picture_depends_on_the_batch(run: Run, tmp_path: Path) -> None:
    run(batch=1, out=tmp_path / "one" / "evaluate.jsonl", seeds=2)
    run(batch=6, out=tmp_path / "six" / "evaluate.jsonl", seeds=2)
    one, six = pictures(tmp_path / "one"), pictures(tmp_path / "six")
    assert list(one) == list(six)
    assert len({p.tobytes() for p in one.values()}) == len(one) == 12
    for name in one:
        assert np.abs(one[name] - six[name]).max() <= 1  # kernels round differently at another batch size


def test_records_draw_curve_and_sliders(run: Run, tmp_path: Path) -> None:
    records = run(samples=2)
    results = read_results([tmp_path / "results"])
    assert list(results.quality) == records
    assert [(s.record.prompt, s.record.label) for s in results.samples] == [
        ("red apple", "tome ratio=0.5"),
        ("blue boat", "tome ratio=0.5"),
    ]
    for sample in results.samples:
        assert sample.dense.is_file()
        assert sample.image.is_file()
    (folder,) = (tmp_path / "results" / "evaluate").iterdir()
    conditions = json.loads((folder / "conditions.json").read_text())
    assert conditions["steps"] == records[0].conditions["steps"] == 2
    assert conditions["versions"]["torch"] == torch.__version__


def test_a_run_that_is_cut_off_continues_and_draws_nothing_twice(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = PipelineCall.__call__, []

    def counted(self, pipe, on_step):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(self.arguments["prompt"])
        return original(self, pipe, on_step)

    # The warm-up before the first image of a variant is not counted.
    monkeypatch.setattr(Studio, "warm_up", lambda self, name, call: None)
    monkeypatch.setattr(PipelineCall, "__call__", counted)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert calls == [["red apple", "blue boat"]] * 2 + [["green tree"]]
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.png")}
    assert len(times) == 5
    monkeypatch.setattr(PipelineCall, "__call__", original)
    drawn: list[int] = []
    records = run(drawn=drawn)
    assert drawn == [0, 1]
    assert {path: path.stat().st_mtime_ns for path in times} == times
    monkeypatch.setattr(
        "tokenmerge_tools.evaluate.runner.load_pipeline_for", lambda *_: pytest.fail("it was loaded")
    )
    content = (tmp_path / "results" / "evaluate.jsonl").read_bytes()
    assert run() == records
    assert (tmp_path / "results" / "evaluate.jsonl").read_bytes() == content


@pytest.mark.slow
def test_only_what_is_new_is_drawn_and_other_conditions_share_nothing(
    run: Run, prompts: Path, tmp_path: Path
) -> None:
    def new(**changes: object) -> int:
        drawn: list[int] = []
        run(drawn=drawn, **changes)
        return drawn[-1] if drawn else 0

    assert new(limit=2) == 4
    assert new() == 2
    assert new(variants=("tome", "tome:merge_mlp")) == 3
    assert new(seeds=2, limit=1) == 2
    assert new(guidance=2.0, limit=1) == 2
    assert new(steps=1, limit=1) == 2


def test_other_weights_under_the_same_name_are_drawn_anew(run: Run, models: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(models / "tiny", model)

    def new() -> int:
        drawn: list[int] = []
        run(model=str(model), limit=1, drawn=drawn)
        return drawn[-1] if drawn else 0

    assert (new(), new()) == (2, 0)
    (weights, *_) = (model / "unet").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes())
    assert (new(), new()) == (2, 0)
    (model / "README.md").write_text("about")
    assert new() == 0


def test_a_hub_model_is_known_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = "/cache/models--owner--name/snapshots/0123abc/model_index.json"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: cached)
    assert weights_key(ModelSource(SourceKind.HUB, "owner/name")) == "0123abc"


@pytest.mark.usefixtures("finished")
def test_figures_of_an_earlier_run_stay(run: Run, models: Path, tmp_path: Path) -> None:
    network = str(models / "dino")
    run(metrics=(f"clip={models / 'clip'}",))
    records = run(metrics=(f"dino={network}",))
    assert list(by_label(records)["tome ratio=0.5"].figures) == ["psnr", "ssim", "clip", "dino"]
    assert records[1].measured_with == {"clip": str(models / "clip"), "dino": network}
    assert list(read_results([tmp_path / "results"]).quality) == records


def test_sets_are_compared_with_dense_or_with_a_folder(run: Run, models: Path, tmp_path: Path) -> None:
    metrics = tuple(f"{name}={models / 'dino'}" for name in DISTANCES)
    notes: list[str] = []
    dense, tome = run(metrics=metrics, notes=notes, batch=1)
    assert dense.figures == {}
    assert tome.figures["fid"] > 0
    assert "fid of only 3 images is biased upwards" in "\n".join(notes)
    network, folder = Vision(str(models / "dino")), tmp_path / "results" / "evaluate"

    def features(variant: str) -> torch.Tensor:
        paths = sorted(folder.rglob(f"{variant}*/*.png"))
        return torch.cat([network([Image.open(path).convert("RGB")]) for path in paths])

    one, two = features("tome"), features("dense")
    # The same features in another order. FID adds roots of eigenvalues, of which some are 0 up to 1e-16.
    for name in DISTANCES:
        assert tome.figures[name] == pytest.approx(distance(name, one, two), rel=1e-5)
    (tmp_path / "reference" / "below").mkdir(parents=True)
    for seed in range(5):
        picture(seed, side=20 + 4 * seed).save(tmp_path / "reference" / "below" / f"{seed}.PNG")
    dense_to_folder, tome_to_folder = run(metrics=metrics, reference=tmp_path / "reference")
    assert dense_to_folder.figures["fid"] > tome.figures["fid"]
    assert tome_to_folder.figures["fid"] != tome.figures["fid"]
    assert tome_to_folder.measured_with["fid"].endswith(f"dino, against {tmp_path / 'reference'}")
    assert list(read_results([tmp_path / "results"]).quality) == [dense_to_folder, tome_to_folder]
    (table,) = quality_tables([dense_to_folder, tome_to_folder])
    assert {"fid ↓", "kid ↓"} <= set(table.header)
    assert run(metrics=metrics)[0].figures == {}  # dense has no distance from itself


def test_distances_between_sets_need_two_pictures(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for loaded in ("load_pipeline_for", "load_metrics"):
        monkeypatch.setattr(f"tokenmerge_tools.evaluate.runner.{loaded}", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=r"fid: expected at least 2 images, got 1; add --seeds 2"):
        run(metrics=("fid",), limit=1)


def test_a_note_counts_pictures_that_equal_dense(run: Run) -> None:
    _, tome = run(variants=("tome:ratio=0",), limit=2)
    assert tome.figures == {"ssim": 1.0}
    assert tome.notes == (
        "tome ratio=0: 2 of 2 images equal dense in every pixel; their PSNR is infinite and not in the mean",
    )


def test_a_figure_that_is_no_number_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    infinite, nan = float("inf"), float("nan")
    columns = {"psnr": [20.0, infinite, 30.0], "ssim": [0.5, nan, 0.5], "dino": [0.5, infinite, 0.5]}
    metrics = SimpleNamespace(
        of_pictures=[SimpleNamespace(name=name) for name in ("psnr", "ssim", "dino")],
        of_sets=dict.fromkeys(DISTANCES, "network"),
    )
    monkeypatch.setattr(measure, "distance", lambda name, one, two: {"fid": nan, "kid": -0.5}[name])
    features = {"network": [torch.zeros(3, 2)]}
    measured = Measured(columns, features=features)
    assert measured.figures(metrics, features) == Figures(
        {"psnr": 25.0, "kid": -0.5}, 1, undefined=("ssim", "dino", "fid"), errors={"psnr": 5.0}
    )
    columns["psnr"][0] = nan
    assert measured.figures(metrics).values == {}


@pytest.mark.usefixtures("finished")
def test_notes_name_metrics_that_are_left_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = Figures({"ssim": 1.0}, equal=0, undefined=("psnr",))
    monkeypatch.setattr(Measured, "figures", lambda *_: figures)
    _, tome = run()
    assert tome.figures == {"ssim": 1.0}
    assert any("psnr is left out" in note for note in tome.notes)


def test_fewer_steps_are_those_whose_operations_fit(run: Run) -> None:
    variants = ("tome", "auto:reuse.every=2,min_tokens=0", "fewer-steps")
    records = by_label(run(variants=variants, speedup=(1.5,), steps=12, limit=1))
    dense, tome, auto, *fewer = records.values()
    assert [record.steps_used for record in (dense, tome, auto)] == [None] * 3
    by_merging, by_reuse = (record.steps_used for record in fewer)
    assert list(records)[3:] == [f"fewer-steps steps={by_merging}", f"fewer-steps steps={by_reuse}"]
    # Half of the steps skip the levels below the finest, which are a part of the operations.
    assert 6 <= by_reuse < by_merging < 12


def test_where_nothing_can_be_counted_fewer_steps_are_those_of_the_wanted_speeds() -> None:
    specs = parse_variants(["deepcache", "fewer-steps"], [0.5], [2.0])
    found = plan_variants(specs, 24, [1.5, 3.0])
    assert [one.steps(24) for one in found] == [24, 24, 16, 8]


def test_a_variant_that_counts_no_saving_has_no_fewer_steps() -> None:
    specs = parse_variants(["tome", "fewer-steps"], [0.25, 0.5], [2.0])
    *_, fewer = plan_variants(specs, 25, [1.01, 2.0])
    assert (fewer.label, fewer.steps(25)) == ("fewer-steps steps=12", 12)


def test_pictures_are_timed(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up clock times the calls: dense 6 and 2 s for the two batches, merged 3 and 0.5 s."""
    taken = {("red apple", "blue boat"): (6.0, 3.0), ("green tree",): (2.0, 0.5)}
    original, now = PipelineCall.__call__, [0.0]

    def timed(self, pipe, on_step):
        merges = "_tokenmerge" in pipe.unet.__dict__
        if self.arguments["num_inference_steps"] == 5:
            now[0] += taken[tuple(self.arguments["prompt"])][merges]
        else:
            now[0] += 100  # the warm-up before the first image
        return original(self, pipe, on_step)

    monkeypatch.setattr(PipelineCall, "__call__", timed)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    dense, tome = run(steps=5)
    assert (dense.speedup, dense.speedup_quartiles) == (None, None)
    assert (tome.speedup, tome.speedup_quartiles) == (2.0, (2.0, 3.0))
    # The time is kept in the file of the image, so a run that draws nothing has it too.
    assert run(steps=5)[1].speedup == 2.0
    for path in (tmp_path / "results").rglob("*-seed0.png"):
        Image.open(path).save(path)
    assert run(steps=5)[1].speedup is None


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"variants": ("oracle",)}, ConfigError, "got 'oracle'"),
        ({"variants": ("none",)}, ConfigError, "expected some of auto, tome, .*, fewer-steps, got 'none'"),
        ({"variants": ("fewer-steps",)}, ConfigError, "give one too"),
        ({"ratio": (0.9,)}, ConfigError, "0.75"),
        ({"limit": 0}, ConfigError, "limit: expected an integer ≥ 1, got 0"),
        ({"seeds": 0}, ConfigError, "seeds: expected an integer ≥ 1, got 0"),
        ({"batch": 0}, ConfigError, "batch: expected an integer ≥ 1, got 0"),
        ({"metrics": ("none",)}, ConfigError, "got 'none'"),
        ({"metrics": ("glyphs",)}, ConfigError, "'red apple' names no glyph"),
        ({"reference": Path()}, ConfigError, "only fid and kid compare with it"),
        (
            {"reference": Path("none"), "metrics": ("fid",)},
            ConfigError,
            "reference: expected a folder with at least 2 images.*none with 0",
        ),
        ({"prompts": None}, ConfigError, "only bundled models .emoji-unet, emoji-mmdit. have their own"),
        ({"out": Path("results")}, ConfigError, "expected a file ending in .jsonl, got results"),
        ({"size": (30, 31)}, ConfigError, "multiples of 2"),
        ({"size": (8, 8)}, ConfigError, "SSIM needs at least 11 pixels, got 8x8"),
        ({"variants": ("tome:min_tokens=1000",), "size": (16, 16)}, NothingToMergeError, "merge"),
        ({"model": "./none"}, ConfigError, "there is no folder ./none"),
        ({"scheduler": "none"}, ConfigError, "scheduler: 'none' is unknown"),
        ({"device": "none"}, ConfigError, "device: cannot use 'none'"),
    ],
)
def test_bad_input_is_named_before_anything_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict, error: type, words: str
) -> None:
    monkeypatch.setattr(
        "tokenmerge_tools.evaluate.runner.load_pipeline_for", lambda *_: pytest.fail("it was loaded")
    )
    with pytest.raises(error, match=words):
        run(**changes)
    assert not list(tmp_path.rglob("*.png"))


def test_a_missing_tomesd_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenmerge_tools.variants import variant as variants

    without = dataclasses.replace(variants.VARIANTS["tomesd"], package="nobody==1")
    monkeypatch.setitem(variants.VARIANTS, "tomesd", without)
    with pytest.raises(
        ConfigError,
        match="variant tomesd: nobody is not installed; run: pip install nobody==1; or leave it out",
    ):
        run(variants=("tome", "tomesd"))


def test_a_full_disk_keeps_what_is_finished(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original, saved = Image.Image.save, []

    def save(self, path, **about):
        if len(saved) == 3:
            Path(path).write_bytes(b"half of an image")
            raise OSError(28, "No space left on device")
        saved.append(path)
        original(self, path, **about)

    monkeypatch.setattr(Image.Image, "save", save)
    with pytest.raises(ConfigError, match=r"out: cannot write .*No space left.*finished images are safe"):
        run()
    assert len(pictures(tmp_path)) == len(list(tmp_path.rglob("*.png"))) == 3
    monkeypatch.setattr(Image.Image, "save", original)
    append = ResultsFile.append

    def full(self, record):
        if isinstance(record, SampleRecord):
            raise RecordNotWrittenError("full")
        append(self, record)

    monkeypatch.setattr(ResultsFile, "append", full)
    with pytest.raises(RecordNotWrittenError):
        run()
    monkeypatch.setattr(ResultsFile, "append", append)
    records = run()
    assert list(read_results([tmp_path / "results"]).quality) == records


def full(*_: object, **named: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_disk_without_room_for_the_conditions_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match=r"out: cannot write .*conditions.json .No space left"):
        run()


@pytest.mark.usefixtures("finished")
def test_a_picture_replaced_by_one_of_another_size_is_named(run: Run, tmp_path: Path) -> None:
    run()
    path = sorted(tmp_path.rglob("tome*/*.png"))[0]
    picture(0, side=16).save(path)
    with pytest.raises(ConfigError, match=rf"{path} should have 32x32 pixels, but has 16x16; delete it"):
        run()


def test_too_little_memory_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(PipelineCall, "__call__", fail)
    with pytest.raises(ConfigError, match="batch: 2 images at once do not fit into memory; lower --batch"):
        run()


@pytest.mark.usefixtures("finished")
def test_a_torn_results_file_is_reported_and_continued(run: Run, tmp_path: Path) -> None:
    run()
    file = tmp_path / "results" / "evaluate.jsonl"
    file.write_text(file.read_text()[:-20])
    notes: list[str] = []
    records = run(notes=notes)
    assert "torn" in notes[0]
    assert list(read_results([tmp_path / "results"]).quality) == records
    assert len(read_results([tmp_path / "results"]).samples) == 3
