"""A tiny pipeline, and a studio whose times and closeness are made up instead of measured."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import tiny_pipeline
from diffusers import StableDiffusionPipeline
from PIL import Image

from tokenmerge.config import ToMeConfig
from tokenmerge.measure.bench.variants import DENSE, VariantSpec
from tokenmerge.measure.evaluate.variants import Drawn
from tokenmerge.measure.tune import runner, studio
from tokenmerge.measure.tune.candidates import Candidate
from tokenmerge.measure.tune.goal import Goal
from tokenmerge.measure.tune.options import TuneOptions
from tokenmerge.measure.tune.studio import Drawing, Failed, Studio

DENSE_SECONDS = 10.0


class MadeUp(Studio):
    """A studio that draws nothing.

    Attributes:
        drawn: (setting, item) of every look, over all instances.
        stop: raised before the look of this number, and the number.
        failing: settings that cannot run.
    """

    drawn: list[tuple[str, int]] = []  # noqa: RUF012
    stop: tuple[int, BaseException] | None = None
    failing: tuple[str, ...] = ()

    def draw(
        self, item: int, chosen: Sequence[Candidate], configs: Mapping[str, ToMeConfig | None]
    ) -> Iterator[Drawing | Failed]:
        self._save(Drawn(VariantSpec(DENSE), self.steps), item, 0)
        for one in chosen:
            if MadeUp.stop is not None and len(MadeUp.drawn) >= MadeUp.stop[0]:
                raise MadeUp.stop[1]
            if one.name in MadeUp.failing:
                yield Failed(one.name, "it is made to fail")
                continue
            MadeUp.drawn.append((one.name, item))
            number = zlib.crc32(one.name.encode()) % 100
            speedup = 1.0 + number / 50
            psnr = 60.0 - number / 4 + item % 3
            self._save(one.drawn, item, number)
            seconds = DENSE_SECONDS / speedup
            cost = seconds + DENSE_SECONDS / len(chosen)
            yield Drawing(one.name, seconds, DENSE_SECONDS, cost, {"psnr": psnr, "ssim": 0.9})

    def _save(self, drawn: Drawn, item: int, level: int) -> None:
        path = self.evaluation.store.picture(drawn, self.evaluation.items[item])
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", self.evaluation.size, (level, level, level)).save(path)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pipeline.write_pipeline(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("red apple\nblue boat\ngreen tree\n")
    return path


@pytest.fixture(scope="session")
def pipe(model: Path) -> StableDiffusionPipeline:
    return StableDiffusionPipeline.from_pretrained(model, safety_checker=None)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, pipe: StableDiffusionPipeline) -> type[MadeUp]:
    """The studio that draws nothing, in place of the real one."""
    monkeypatch.setattr(studio, "load_pipeline", lambda *_: pipe)
    # A tiny model is counted in more time than it is drawn.
    monkeypatch.setattr(runner, "_WORTH_COUNTING", 0.0)
    monkeypatch.setattr(MadeUp, "drawn", [])
    monkeypatch.setattr(MadeUp, "stop", None)
    monkeypatch.setattr(MadeUp, "failing", ())
    monkeypatch.setattr(runner, "Studio", MadeUp)
    monkeypatch.setattr("tokenmerge.auto.fewest_tokens", lambda *_: 4)
    return MadeUp


@pytest.fixture
def options(model: Path, prompts: Path, tmp_path: Path):
    def make(**changes: object) -> TuneOptions:
        values = {
            "goal": Goal("psnr", speedup=1.5),
            "model": str(model),
            "prompts": prompts,
            "steps": 20,
            "device": "cpu",
            "items": 8,
            "within": 100_000.0,
            "out": tmp_path / "results" / "tuned.json",
        }
        return TuneOptions(**{**values, **changes})

    return make
