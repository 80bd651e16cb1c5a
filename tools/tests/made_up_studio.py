"""A studio for ``tokenmerge tune`` whose times and closeness are made up instead of measured."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

import pytest
from diffusers import StableDiffusionPipeline
from PIL import Image

from tokenmerge.config import ToMeConfig
from tokenmerge_tools.tune import rounds, runner
from tokenmerge_tools.tune.candidates import Candidate
from tokenmerge_tools.tune.rounds import Failed, Outcome, Rounds
from tokenmerge_tools.variants.variant import DENSE, Variant

DENSE_SECONDS = 10.0


class MadeUp(Rounds):
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
    ) -> Iterator[Outcome | Failed]:
        self._save(Variant(DENSE), item, 0)
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
            self._save(one.variant, item, number)
            seconds = DENSE_SECONDS / speedup
            cost = seconds + DENSE_SECONDS / len(chosen)
            yield Outcome(one.name, seconds, DENSE_SECONDS, cost, {"psnr": psnr, "ssim": 0.9})

    def _save(self, drawn: Variant, item: int, level: int) -> None:
        path = self.evaluation.store.picture(drawn, self.evaluation.items[item])
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", self.evaluation.size, (level, level, level)).save(path)


def install(monkeypatch: pytest.MonkeyPatch, pipe: StableDiffusionPipeline) -> type[MadeUp]:
    """Replace the real studio by the one that draws nothing, and every model by this pipeline."""
    monkeypatch.setattr(MadeUp, "drawn", [])
    monkeypatch.setattr(MadeUp, "stop", None)
    monkeypatch.setattr(MadeUp, "failing", ())
    monkeypatch.setattr(runner, "Rounds", MadeUp)
    monkeypatch.setattr(rounds, "load_pipeline_for", lambda *_: pipe)
    # Counting the operations of a tiny model takes longer than drawing with it.
    monkeypatch.setattr(runner, "_WORTH_COUNTING", 0.0)
    # The source may change while the tests run.
    monkeypatch.setattr("tokenmerge_tools.evaluate.evaluation.source_commit", lambda: None)
    # A device on which merging saves time on every grid; here a tiny one need not.
    monkeypatch.setattr("tokenmerge.default_method.fewest_tokens", lambda *_: 4)
    return MadeUp
