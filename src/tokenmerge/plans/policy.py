"""The policy: the expected error of step reuse and of token merging.

It depends on the class of the model and on the strength of guidance.
All numbers are in ``policy.json``, which ``benchmarks/policy.py`` writes. Each class of model names the
records that its numbers were fitted on. An expected error is the mean squared error of the image, whose
values are from 0 to 1.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from itertools import chain
from typing import Any, NamedTuple

_TABLE: Mapping[str, Any] = json.loads(
    resources.files(__package__).joinpath("policy.json").read_text("utf-8")
)
_CLASSES = ("unet", "transformer")
# By class of model, the fewest tokens of a grid that merges: on smaller ones, skipping more steps loses less.
FEWEST_TOKENS: Mapping[str, int] = _TABLE["fewest tokens"]
# How many times the expected error of merging is higher without proportional attention.
_UNWEIGHTED: float = _TABLE["without proportional attention"]
# The time that is left after the last full step where the last step changes little, as a share of a
# distance.
TAIL_OF_A_CLEAN_END: float = _TABLE["spacing"]["tail of a clean end"]
# Expected error of skipping a whole model, divided by that of skipping the blocks of a transformer.
WHOLE_OUTPUT: float = _TABLE["output"]["times the blocks of a transformer"]
# Where the next full step makes good what forecasts missed, this share of what they missed is left.
LEFT_OF_MISSED: float = _TABLE["made good"]["share of what forecasts missed"]
# Expected error of skipping there, divided by that of skipping under weak guidance.
MADE_GOOD: float = _TABLE["made good"]["times the expected error of skipping"]
ESTIMATE: Mapping[str, Any] = _TABLE["estimate"]  # the numbers of ``estimate.estimate_closeness``


class Power(NamedTuple):
    """An expected error that grows as a power: ``size`` · x^``growth``."""

    size: float
    growth: float

    def at(self, x: float) -> float:
        """Return the expected error at x."""
        return self.size * x**self.growth


@dataclasses.dataclass(frozen=True)
class ExpectedErrors:
    """One row of the policy."""

    # Expected error of a step that skips a part, by the part and the reach of the forecast.
    skip: Mapping[str, Power]
    merge: Mapping[str, Power]  # expected error of merging in all steps, by the scope and the ratio
    # Share of the expected error of merging that is left, by the number of steps between two corrections, or
    # None if corrections lose more than they give back.
    corrected: Power | None
    # Parts of which skipped steps err in one direction, so that their errors add before they are squared.
    coherent: frozenset[str]
    # Exponent of the places of full steps, see ``choose.later_ones``. It is 1 for equal distances.
    spacing: float

    def of_skipping(self, part: str, reaches: Sequence[float], steps: int) -> float:
        """Return the expected error of skipping a part, if the model has it.

        ``reaches`` are those of the steps that skip it.
        """
        if part not in self.skip:
            return 0.0
        size, growth = self.skip[part]
        if part in self.coherent:
            return size * (sum(reach ** (growth / 2) for reach in reaches) / steps) ** 2
        return size * sum(reach**growth for reach in reaches) / steps

    def of_merging(self, scope: str, ratio: float, every: float, proportional: bool = True) -> float:
        """Return the expected error of merging with a correction in one of ``every`` steps.

        With 0, no step corrects. Steps that skip parts of the model count too. ``every`` is at most the
        number of all steps, since a correction only has to last until the end.
        """
        if not ratio:
            return 0.0
        size = self.merge[scope] if scope in self.merge else max(self.merge.values())
        expected_error = size.at(ratio) * (1.0 if proportional else _UNWEIGHTED)
        if every and self.corrected is not None:
            expected_error *= min(1.0, self.corrected.at(every - 1))
        return expected_error


def fewest_tokens(model: str) -> int:
    """Return the fewest tokens of a grid that merges in models of a class.

    A class without a number merges on every grid. A model of no known class gets the highest number.
    """
    return FEWEST_TOKENS.get(model, 0 if model in _CLASSES else max(FEWEST_TOKENS.values()))


@functools.lru_cache(maxsize=128)
def expected_errors_of(model: str, guidance: float | None) -> ExpectedErrors:
    """Return the row for a class of model and a scale of guidance.

    Unknown guidance is treated as strong. A class that the table lacks gets the highest expected errors of
    all classes.
    """
    if model == "output":
        of_blocks = expected_errors_of("transformer", guidance)
        skip = {name: Power(WHOLE_OUTPUT * one.size, one.growth) for name, one in of_blocks.skip.items()}
        return dataclasses.replace(of_blocks, skip=skip)
    strength = "strong" if guidance is None or guidance >= _TABLE["strong guidance"] else "weak"
    rows = [_TABLE[name][strength] for name in ([model] if model in _CLASSES else _CLASSES)]
    corrected = [row["corrected"] for row in rows]
    return ExpectedErrors(
        skip=_highest(row["skip"] for row in rows),
        merge=_highest(_of_both_scopes(row["merge"]) for row in rows),
        corrected=Power(*max(corrected)) if all(corrected) else None,
        coherent=frozenset(chain.from_iterable(row["skip"] for row in rows if _errs_in_one_direction(row))),
        spacing=_TABLE["spacing"].get(model, {}).get(strength, 1.0),
    )


def _of_both_scopes(merge: Mapping[str, list[float]]) -> Mapping[str, list[float]]:
    """Return the numbers of both scopes. One that has none of its own has those of the other."""
    return {scope: merge.get(scope) or max(merge.values()) for scope in ("layers", "block")}


def _errs_in_one_direction(row: Mapping[str, Any]) -> bool:
    return row.get("skipped steps err") == "in one direction"


def _highest(rows: Iterable[Mapping[str, list[float]]]) -> Mapping[str, Power]:
    every = sorted(chain.from_iterable(row.items() for row in rows), key=lambda item: item[1][0])
    return {name: Power(*numbers) for name, numbers in every}
