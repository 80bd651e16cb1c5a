"""A studio for ``tokenmerge tune`` whose times and closeness are made up instead of measured."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from diffusers import StableDiffusionPipeline
from PIL import Image

from tokenmerge.config import ToMeConfig
from tokenmerge.plans import pays_from
from tokenmerge_tools.tune import rounds, runner
from tokenmerge_tools.tune.plans import SearchedPlan
from tokenmerge_tools.tune.rounds import CannotRunError, Rounds
from tokenmerge_tools.variants.variant import DENSE, FEWER_STEPS, Variant

DENSE_SECONDS = 10.0


class MadeUp(Rounds):
    """A studio that draws nothing.

    Attributes:
        drawn: (plan, item) of every image, over all instances.
        stop: raised before the image of this number, and the number.
        failing: names of plans that cannot run.
        gains: whether plans that the search finds closer are closer on the prompts of the check too.
    """

    drawn: list[tuple[str, int]] = []  # noqa: RUF012
    stop: tuple[int, BaseException] | None = None
    failing: tuple[str, ...] = ()
    gains: bool = True

    def dense(self, item: int) -> None:
        pass

    def snr(self, item: int, config: ToMeConfig) -> float:
        plan = SearchedPlan.of(config, self.steps)
        self._note(plan.name, item)
        if plan.name in MadeUp.failing:
            raise CannotRunError("it is made to fail")
        return closeness(plan.runs, item)

    def draw(
        self,
        item: int,
        chosen: Mapping[str, Variant],
        configs: Mapping[str, ToMeConfig],
        on_failure: Callable[[str, str], None],
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        self._save(Variant(DENSE), item, 0)
        for name, one in chosen.items():
            self._note(name, item)
            if name in MadeUp.failing:
                on_failure(name, "it is made to fail")
                continue
            psnr = 10.0 + item % 3
            if name in configs:
                runs = SearchedPlan.of(configs[name], self.steps).runs
                psnr = (
                    closeness(runs, item) if MadeUp.gains else 30.0 + zlib.crc32(f"{runs}{item}".encode()) % 7
                )
            self._save(one, item, zlib.crc32(name.encode()) % 100)
            seconds = DENSE_SECONDS / (1.5 if one.name == FEWER_STEPS else 2.0)
            times = {"seconds": seconds, "dense_seconds": DENSE_SECONDS, "cost": seconds}
            yield name, {**times, "metrics": {"psnr": psnr, "ssim": 0.9}}

    def _note(self, name: str, item: int) -> None:
        if MadeUp.stop is not None and len(MadeUp.drawn) >= MadeUp.stop[0]:
            raise MadeUp.stop[1]
        MadeUp.drawn.append((name, item))

    def _save(self, drawn: Variant, item: int, level: int) -> None:
        path = self.evaluation.store.picture(drawn, self.evaluation.items[item])
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", self.evaluation.size, (level, level, level)).save(path)


def closeness(runs: str, item: int) -> float:
    """How close a plan is: the more full steps have an even number, the closer."""
    return 30.0 + item % 3 + sum(sign == "M" for sign in runs[::2])


def install(monkeypatch: pytest.MonkeyPatch, pipe: StableDiffusionPipeline) -> type[MadeUp]:
    """Replace the real studio by the one that draws nothing, and every model by this pipeline."""
    monkeypatch.setattr(MadeUp, "drawn", [])
    monkeypatch.setattr(MadeUp, "stop", None)
    monkeypatch.setattr(MadeUp, "failing", ())
    monkeypatch.setattr(MadeUp, "gains", True)
    monkeypatch.setattr(runner, "Rounds", MadeUp)
    monkeypatch.setattr(rounds, "load_pipeline_for", lambda *_: pipe)
    # The source may change while the tests run.
    monkeypatch.setattr("tokenmerge_tools.evaluate.evaluation.source_commit", lambda: None)
    # A device on which merging saves time on every grid; here a tiny one need not.
    monkeypatch.setattr("tokenmerge.default_method.fewest_tokens", lambda *_: pays_from(4))
    return MadeUp
