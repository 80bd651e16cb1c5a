"""The kinds of records. Each record is one line of JSON in a results file, and a file may mix all kinds."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import PurePosixPath
from typing import Any, ClassVar

from tokenmerge.config.checks import integer
from tokenmerge.config.former import FORMER_PARTS
from tokenmerge.errors import ConfigError
from tokenmerge.plans import FewestTokens, pays_from

STATUSES = ("ok", "oom", "unavailable", "error")
# Metrics that are lower for closer images.
LOWER_IS_CLOSER = frozenset({"lpips", "fid", "kid", "motion-error"})

# Former names of settings, with the current ones. Records from before December 2026 have the former names.
NEW_NAMES: Mapping[str, str] = {
    "plan_every": "merge_sharing.every",
    "share_plan": "merge_sharing.blocks",
    "share_guidance": "merge_sharing.guidance",
    "plans.every": "merge_sharing.every",
    "plans.blocks": "merge_sharing.blocks",
    "plans.guidance": "merge_sharing.guidance",
    "correct_every": "correction.every",
    "reuse_every": "reuse.every",
    "reuse_finest_every": "reuse.shallow_every",
    "reuse_finest_from": "reuse.shallow_from",
    "reuse_span": "reuse.span",
}
_OLD_WORD = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, NEW_NAMES))})(?![\w.])")

# Conditions that a timed cell and drawn images have in common.
_OF_IMAGES = ("model", "width", "height", "steps", "scheduler", "guidance", "dtype", "attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """The base of all kinds. ``KIND`` is the name of the kind in a file."""

    KIND: ClassVar[str]

    @property
    def key(self) -> str:
        """A later record replaces earlier ones with the same key."""
        return key_of(dataclasses.asdict(self))

    def to_line(self) -> str:
        """Return one line of JSON, its newline included. A number that is not finite is a ValueError."""
        values = {"kind": self.KIND, **dataclasses.asdict(self)}
        return json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Any:
        """Read what :meth:`to_line` wrote. Fields with a default may be missing in older records."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        nothing = {dataclasses.MISSING}
        needed = [name for name, one in fields.items() if {one.default, one.default_factory} == nothing]
        missing = [name for name in needed if name not in values]
        if missing:
            raise ConfigError(f"not a {cls.KIND} record: {', '.join(missing)} missing")
        try:
            return cls(**cls._parse({name: values[name] for name in fields if name in values}))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"not a {cls.KIND} record ({error!r}); remove that line") from error

    @classmethod
    def _parse(cls, values: dict[str, Any]) -> dict[str, Any]:
        return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class CellRecord(Record):
    """One cell of a benchmark: a variant at one setting on one machine.

    ``conditions`` has everything that the results depend on. The status ``"unavailable"`` says that it cannot
    run on this machine or model, and ``"error"`` that the next run tries it again. ``seconds`` has the time
    of each timed call, and ``references`` those of dense runs in the same rounds: ``"dense"`` with fused
    attention, and ``"dense, same attention"``. ``facts`` are other results, such as ``flops_dense``.
    """

    KIND: ClassVar[str] = "bench"

    conditions: Mapping[str, Any]
    status: str
    message: str = ""
    seconds: tuple[float, ...] = ()
    peak_bytes: int | None = None
    references: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    finished: str = ""

    @property
    def key(self) -> str:
        """A key of the cell, equal for equal conditions."""
        return key_of(self.conditions)

    @property
    def label(self) -> str:
        """The variant with its settings, such as ``"tome ratio=0.5"``."""
        return variant_label(self.conditions["variant"], self.conditions["settings"])

    @property
    def median(self) -> float | None:
        """Median seconds of a call, or None if it was not timed."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def iqr(self) -> tuple[float, float] | None:
        """First and third quartile of the seconds, or None if it was not timed."""
        if len(self.seconds) < 2:
            return (self.seconds[0], self.seconds[0]) if self.seconds else None
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def speedup(self) -> float | None:
        """t_dense / t, or None if it was not timed. Dense has fused attention and ran in the same rounds."""
        return self._over("dense")

    @property
    def speedup_same_attention(self) -> float | None:
        """t_dense / t, where dense runs with the attention of this cell: the gain of merging alone."""
        return self._over("dense, same attention")

    def _over(self, reference: str) -> float | None:
        dense = self.references.get(reference)
        return statistics.median(dense) / statistics.median(self.seconds) if dense and self.seconds else None

    @classmethod
    def _parse(cls, values: dict[str, Any]) -> dict[str, Any]:
        conditions = {**values["conditions"], "settings": with_new_names(values["conditions"]["settings"])}
        variant_label(conditions["variant"], conditions["settings"])
        seconds = _times(values.get("seconds", ()))
        if values["status"] not in STATUSES:
            raise ConfigError(f"status: expected one of {', '.join(STATUSES)}, got {values['status']!r}")
        if values["status"] == "ok" and not seconds:
            raise ConfigError("seconds: expected at least one for status ok, got none; remove that line")
        references = {name: _times(times) for name, times in values.get("references", {}).items()}
        return {**values, "conditions": conditions, "seconds": seconds, "references": references}


class _OfVariant(Record):
    """A record of one variant with its settings. Each subclass declares these fields in its own order."""

    variant: str
    settings: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The variant with its settings."""
        return variant_label(self.variant, self.settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QualityRecord(_OfVariant):
    """Quality metrics of one variant, such as its closeness to dense, over many images.

    ``figures`` has the value of each metric, and ``measured_with`` its network and reference images, if any.
    The category is that of the prompts, or None for all prompts. ``conditions`` has everything else that the
    images depend on. Its ``steps`` are the steps of dense, and ``steps_used`` are those of ``"fewer-steps"``.
    The speed-up is the median of t_dense / t over the images, and it has quartiles. ``errors`` has the
    standard errors of the figures. ``cost`` has the median ``seconds``, the ``peak_bytes`` and the
    ``counted`` speed-up by operations, as far as they are known. ``config`` has all settings that the images
    were drawn with, as :meth:`tokenmerge.ToMeConfig.from_dict` takes them.
    """

    KIND: ClassVar[str] = "quality"

    model: str
    width: int
    height: int
    variant: str
    settings: Mapping[str, Any]
    figures: Mapping[str, float]
    images: int
    category: str | None = None
    conditions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    speedup: float | None = None
    speedup_quartiles: tuple[float, float] | None = None
    errors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    cost: Mapping[str, float] = dataclasses.field(default_factory=dict)
    steps_used: int | None = None
    measured_with: Mapping[str, str] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    finished: str = dataclasses.field(default="", compare=False)

    @property
    def drawn_with(self) -> dict[str, Any]:
        """Everything that the images depend on, including the model and the size."""
        return {"model": self.model, "width": self.width, "height": self.height, **self.conditions}

    @property
    def key(self) -> str:
        """A key that is equal for metrics of the same images."""
        names = ("model", "width", "height", "variant", "settings", "images", "category", "conditions")
        return key_of({name: getattr(self, name) for name in (*names, "steps_used")})

    @classmethod
    def _parse(cls, values: dict[str, Any]) -> dict[str, Any]:
        if not all(isinstance(value, int | float) for value in values["figures"].values()):
            raise ValueError(f"expected numbers in figures, got {values['figures']}")
        names = {"conditions", "measured_with", "errors", "cost"} & values.keys()
        quartiles = values.get("speedup_quartiles")
        return {
            **values,
            **{name: dict(values[name]) for name in names},
            "settings": with_new_names(values["settings"]),
            "config": _config_with_new_names(values.get("config")),
            "speedup_quartiles": None if quartiles is None else tuple(quartiles),
            "notes": tuple(values.get("notes", ())),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleRecord(_OfVariant):
    """A dense image and the image of a variant with the same prompt and seed.

    The paths ``dense`` and ``image`` are relative to the folder of the file with this record.
    """

    KIND: ClassVar[str] = "sample"

    prompt: str
    seed: int
    variant: str
    settings: Mapping[str, Any]
    dense: str
    image: str

    @classmethod
    def _parse(cls, values: dict[str, Any]) -> dict[str, Any]:
        for path in map(PurePosixPath, (values["dense"], values["image"])):
            if path.is_absolute() or ".." in path.parts:
                raise ConfigError(f"not a sample: expected a path inside the results folder, got {path}")
        return {**values, "settings": with_new_names(values["settings"])}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneRecord(Record):
    """One measurement of ``tokenmerge tune``.

    ``conditions`` is a key of everything that it depends on, except the variant and the item. A record about
    an ``"image"`` has its seconds, its closeness, and the estimate after its run. A record about ``"facts"``
    has what was measured in order to plan as the default method does. The item is the number of the prompt
    and seed, or −1 for a record that is not about an image. Records about anything else are from searches for
    a plan, before December 2026.
    """

    KIND: ClassVar[str] = "tune"

    conditions: str
    about: str
    name: str
    item: int
    values: Mapping[str, Any]

    @property
    def key(self) -> str:
        """A key of what was measured."""
        return key_of({name: getattr(self, name) for name in ("conditions", "about", "name", "item")})

    @classmethod
    def _parse(cls, values: dict[str, Any]) -> dict[str, Any]:
        integer()("item", values["item"])
        found = values["values"]
        if values["about"] == "image":
            _times([found["seconds"]])
            numbers = [*dict(found.get("metrics", {})).values(), found.get("after") or 0.0]
            if not all(isfinite(float(value)) for value in numbers):
                raise ValueError(f"expected finite numbers, got {numbers}")
        elif values["about"] == "look":
            _times(found[name] for name in ("seconds", "dense_seconds", "cost"))
            metrics = [float(value) for value in dict(found["metrics"]).values()]
            if not all(map(isfinite, metrics)):
                raise ValueError(f"expected finite metrics, got {metrics}")
        elif values["about"] == "plan":
            _times([found["seconds"]])
            if not isfinite(float(found["snr"])):
                raise ValueError(f"expected a finite snr, got {found['snr']}")
        elif values["about"] == "dense":
            _times([found["seconds"]])
        elif values["about"] == "facts":
            fewest_tokens_of(found)
        return values


def fewest_tokens_of(values: Mapping[str, Any]) -> tuple[FewestTokens, ...]:
    """Return the least numbers of tokens at which merging saves time, from a record about ``"facts"``.

    Records from before December 2026 have one number for every scope and ratio.
    """
    found = values["fewest_tokens"]
    if isinstance(found, int):
        return pays_from(found)
    return tuple(FewestTokens(str(scope), float(ratio), int(tokens)) for scope, ratio, tokens in found)


def metric_names(records: Sequence[QualityRecord]) -> list[str]:
    """Name all metrics, in the order of the record with the most. Dense has fewer than the others."""
    ordered = sorted(records, key=lambda record: -len(record.figures))
    names: dict[str, None] = {}
    for record in ordered:
        names |= dict.fromkeys(record.figures)
    return list(names)


def cell_of_pictures(
    label: str, conditions: Mapping[str, Any], cells: Iterable[CellRecord]
) -> CellRecord | None:
    """Find the cell that timed a variant under the conditions of its images, or return None.

    If several cells fit, a whole pipeline is preferred, then the smaller batch, then the newer cell. A
    condition that is missing matches any value. ``device`` is only the type of the device.
    """

    def fits(cell: CellRecord) -> bool:
        of_cell = cell.conditions
        # The scheduler does not affect the time of one call of the denoiser.
        ignored = "scheduler" if of_cell["scope"] == "denoiser" else ""
        return (
            cell.label == label
            and not of_cell["compile"]
            and all(
                of_cell[name] == conditions.get(name, of_cell[name]) for name in _OF_IMAGES if name != ignored
            )
            and conditions.get("device") in (None, of_cell["device"].partition(":")[0])
        )

    found = (cell for cell in cells if fits(cell))
    return max(
        found,
        key=lambda cell: (cell.conditions["scope"] == "pipeline", -cell.conditions["batch"], cell.finished),
        default=None,
    )


def key_of(conditions: Mapping[str, Any]) -> str:
    """Make a key for conditions in any order: the first 16 hexadecimal digits of their SHA-256 hash.

    >>> key_of({"a": 1, "b": [2]}) == key_of({"b": [2], "a": 1})
    True
    """
    text = json.dumps(conditions, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def variant_label(variant: str, settings: Mapping[str, Any]) -> str:
    """Name a variant with its settings.

    >>> variant_label("tome", {"ratio": 0.5, "merge_mlp": True})
    'tome ratio=0.5 merge_mlp'
    >>> variant_label("fewer-steps", {"as": "tome ratio=0.5"})
    'fewer-steps (tome ratio=0.5)'
    """
    if set(settings) == {"as"}:
        return f"{variant} ({settings['as']})"
    words = [name if value is True else f"{name}={_short(value)}" for name, value in settings.items()]
    return " ".join([variant, *words])


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _times(seconds: Iterable[Any]) -> tuple[float, ...]:
    times = tuple(map(float, seconds))
    wrong = [time for time in times if not (isfinite(time) and time > 0)]
    if wrong:
        raise ConfigError(f"seconds: expected times above 0, got {wrong[0]}; remove that line")
    return times


def with_new_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recorded variant under their current names.

    The label of another variant, which is recorded under ``"as"``, is rewritten too.

    >>> with_new_names({"ratio": 0.5, "reuse_every": 2})
    {'ratio': 0.5, 'reuse.every': 2}
    """
    renamed = {NEW_NAMES.get(name, name): value for name, value in settings.items()}
    if isinstance(renamed.get("as"), str):
        renamed["as"] = words_with_new_names(renamed["as"])
    return renamed


def _config_with_new_names(config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the recorded settings of an image, with the current names of their parts."""
    if config is None:
        return None
    return {FORMER_PARTS.get(name, name): value for name, value in config.items()}


def words_with_new_names(label: str) -> str:
    """Return the label of a variant, with the current names.

    >>> words_with_new_names("tome ratio=0.5 share_plan")
    'tome ratio=0.5 merge_sharing.blocks'
    """
    return _OLD_WORD.sub(lambda found: NEW_NAMES[found[0]], label)
