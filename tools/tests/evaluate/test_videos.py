"""Evaluating pipelines that draw videos: files of frames, means over frames, and motion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tools.tests.evaluate.conftest import drawn, item, picture
from tools.tests.tiny_video_pipeline import write_video_pipeline
from torch.testing import assert_close

from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge_tools.closeness import motion, motion_error, psnr, ssim
from tokenmerge_tools.evaluate import measure
from tokenmerge_tools.evaluate.measure import mean_of_frames
from tokenmerge_tools.evaluate.picture_store import PictureStore, read_video, write_video
from tokenmerge_tools.generate.run import generate
from tokenmerge_tools.pipelines.options import GenerateOptions
from tokenmerge_tools.records.kinds import QualityRecord
from tokenmerge_tools.reporting.tables import quality_tables
from tokenmerge_tools.sheets import as_tensor

pytestmark = pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning")
FRAMES = 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video_pipeline(tmp_path_factory.mktemp("models") / "wan")


def moving(frames: int = 6, side: int = 24) -> torch.Tensor:
    """A square that moves over a grey background by two pixels per frame, ``[f, 3, h, w]``."""
    video = torch.full((frames, 3, side, side), 0.5)
    for i in range(frames):
        video[i, :, 4:10, 2 * i : 2 * i + 6] = 1.0
    return video


# --- motion ---------------------------------------------------------------------------------------


def test_dense_itself_moves_as_much_and_has_no_error() -> None:
    assert motion(moving(), moving()).item() == 1
    assert motion_error(moving(), moving()).item() == 0


def test_a_frozen_video_does_not_move_and_its_error_is_1() -> None:
    frozen = moving()[:1].expand(6, -1, -1, -1)
    assert motion(frozen, moving()).item() == 0
    assert motion_error(frozen, moving()).item() == 1


def test_half_of_the_motion_lies_between() -> None:
    """Moving each frame halfway to the mean of all frames halves the motion."""
    video = moving()
    half = (video + video.mean(dim=0)) / 2
    assert_close(motion(half, video).item(), 0.5, rtol=1e-5, atol=0)
    assert_close(motion_error(half, video).item(), 0.5, rtol=1e-5, atol=0)


def test_a_shifted_video_moves_as_much_elsewhere() -> None:
    """With a shift by half of the motion per frame, the changing edges overlap in part."""
    shifted = moving().roll(1, dims=3)
    assert_close(motion(shifted, moving()).item(), 1.0, rtol=1e-5, atol=0)
    # With a shift so far that no pixel changes in both videos, their squared errors add up.
    far = moving().roll(12, dims=2)
    assert_close(motion_error(far, moving()).item(), 2**0.5, rtol=1e-5, atol=0)
    assert 0 < motion_error(shifted, moving()).item() < 2**0.5


def test_motion_is_its_formula_and_ignores_brightness() -> None:
    draw = torch.Generator().manual_seed(0)
    one, two = (torch.rand(5, 3, 4, 6, generator=draw) for _ in range(2))
    mine, theirs = (np.diff(x.double().numpy(), axis=0) for x in (one, two))
    assert motion(one, two).item() == pytest.approx(np.linalg.norm(mine) / np.linalg.norm(theirs), rel=1e-5)
    error = np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)
    assert motion_error(one, two).item() == pytest.approx(error, rel=1e-5)
    assert motion_error(one + 0.25, two).item() == pytest.approx(error, rel=1e-5)


def test_against_a_still_video_there_is_no_number() -> None:
    still = torch.ones(3, 3, 4, 4)
    assert not motion(moving(3, 12), torch.ones(3, 3, 12, 12)).isfinite()
    assert motion(still, still).isnan()
    with pytest.raises(ValueError, match="same shape"):
        motion(still, still[:2])


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order", [(0, 1, 2, 3), (0, 0, 1, 1, 1, 2), (0, 1, 1, 0, 0, 0, 0), (0,) * 5, (0, 0, 0, 0, 1)], ids=str
)
def test_a_video_comes_back_as_it_was_also_where_frames_are_equal(order, tmp_path: Path) -> None:
    frames = [picture(seed) for seed in order]
    about = PngInfo()
    about.add_text("what", "a video")
    write_video(tmp_path / "video.png", frames, about)
    found = read_video(tmp_path / "video.png", len(frames), "out", "delete it")
    assert [f.tobytes() for f in found] == [f.tobytes() for f in frames]
    with Image.open(tmp_path / "video.png") as file:
        assert file.info["what"] == "a video"


def test_a_video_of_another_length_or_no_video_is_refused(tmp_path: Path) -> None:
    write_video(tmp_path / "video.png", [picture(0), picture(1)], PngInfo())
    with pytest.raises(ConfigError, match=r"should have 3 frames, but has 2; delete it"):
        read_video(tmp_path / "video.png", 3, "out", "delete it")
    (tmp_path / "broken.png").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="it is not an image"):
        read_video(tmp_path / "broken.png", 2, "out", "delete it")


def test_a_pipeline_that_makes_another_length_is_named(tmp_path: Path) -> None:
    conditions = {"model": "m", "width": 32, "height": 32, "steps": 2, "frames": 10}
    store = PictureStore(tmp_path / "results.jsonl", conditions)
    with pytest.raises(ConfigError, match="made a video of 9 frames instead of 10; give --frames 9"):
        store.save(drawn(), item(), [picture(i) for i in range(9)], None)
    assert not list(tmp_path.rglob("*.png"))


# --- a run ----------------------------------------------------------------------------------------


def test_a_run_measures_the_frames_on_the_disk(
    run: Callable[..., list[QualityRecord]], model: Path, tmp_path: Path
) -> None:
    variants = ("tome:planner=tiled", "tome:planner=tiled,st=2")
    arguments = {"model": str(model), "frames": FRAMES, "size": (64, 48), "variants": variants, "seeds": 2}
    records = run(limit=1, **arguments)
    dense, in_frames, over_time = records
    assert dense.figures == {}
    assert dense.images == 2
    assert dense.conditions["frames"] == FRAMES

    def videos(record: QualityRecord) -> list[torch.Tensor]:
        start = (
            "dense" if record is dense else record.label.replace(" ", "-").replace("=", "-").replace(".", "-")
        )
        (folder,) = [
            path.parent
            for path in sorted((tmp_path / "results").rglob("*seed0.png"))
            if path.parent.name.rpartition("-")[0] == start or path.parent.name == start
        ]
        files = sorted(folder.glob("*.png"))
        return [as_tensor(read_video(file, FRAMES, "out", "")) for file in files]

    for record in (in_frames, over_time):
        pairs = list(zip(videos(record), videos(dense), strict=True))
        expected = {
            "psnr": torch.stack([psnr(a, b).mean() for a, b in pairs]),
            "ssim": torch.stack([ssim(a, b).mean() for a, b in pairs]),
            "motion": torch.stack([motion(a, b) for a, b in pairs]),
            "motion-error": torch.stack([motion_error(a, b) for a, b in pairs]),
        }
        assert record.figures.keys() == expected.keys()
        for name, values in expected.items():
            assert record.figures[name] == pytest.approx(values.double().mean().item(), rel=1e-5)
        assert record.speedup is not None
        assert record.config["planner"] == "tiled"
    assert in_frames.figures["motion-error"] != over_time.figures["motion-error"]
    (table,) = quality_tables(records)
    assert f"{FRAMES} frames" in table.title
    assert {"motion → 1", "motion-error ↓"} <= set(table.header)
    drawn_again: list[int] = []
    run(limit=1, drawn=drawn_again, **arguments)
    assert drawn_again == []


def test_distances_between_sets_count_all_frames(
    run: Callable[..., list[QualityRecord]], models: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"model": str(model), "frames": FRAMES, "size": (64, 48), "limit": 1, "seeds": 2}
    counts: list[tuple[int, int]] = []
    monkeypatch.setattr(
        measure, "distance", lambda name, one, two: counts.append((len(one), len(two))) or 0.25
    )
    _, record = run(metrics=(f"kid={models / 'dino'}", f"dino={models / 'dino'}"), **arguments)
    assert counts == [(2 * FRAMES, 2 * FRAMES)]
    assert record.figures["kid"] == 0.25
    assert {"dino", "motion"} <= record.figures.keys()
    assert record.figures["dino"] <= 1


def test_frames_that_equal_dense_are_not_in_the_mean_of_the_psnr() -> None:
    infinite = float("inf")
    assert mean_of_frames([30.0, infinite, 40.0]) == 35.0
    assert mean_of_frames([infinite, infinite]) == infinite


def test_lengths_are_checked_before_weights_are_loaded(run, options, model: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        "tokenmerge_tools.evaluate.runner.load_pipeline_for", lambda *args: pytest.fail("it was loaded")
    )
    with pytest.raises(ConfigError, match="frames: StableDiffusionPipeline draws images; leave --frames out"):
        run(frames=9)
    with pytest.raises(ConfigError, match="frames: expected an integer ≥ 2, got 1"):
        options(model=str(model), frames=1)


def test_other_commands_say_that_they_draw_pictures(model: Path, tmp_path: Path) -> None:
    wanted = GenerateOptions(prompt="a boat", model=str(model), size=(64, 48), steps=2, out=tmp_path)
    with pytest.raises(UnsupportedModelError, match="WanPipeline draws videos, but images were requested"):
        generate(wanted)
