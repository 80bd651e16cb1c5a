"""Runs a search: plans by their final latents, then the best one and the rule's by timed images."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

from tokenmerge.config import FoundFor, ToMeConfig
from tokenmerge.default_method import DefaultMethod
from tokenmerge.errors import ConfigError
from tokenmerge.models.find import find_hosts
from tokenmerge.plans import ROUNDING, RunFacts, speedup_of
from tokenmerge_tools.evaluate.evaluation import plan_evaluation
from tokenmerge_tools.evaluate.metrics import load_metrics
from tokenmerge_tools.files import prepare_folder
from tokenmerge_tools.pipelines.loading import denoiser_of, require_diffusers
from tokenmerge_tools.pipelines.settings import resolve_device
from tokenmerge_tools.records.file import ResultsFile
from tokenmerge_tools.records.kinds import TuneRecord, fewest_tokens_of, key_of
from tokenmerge_tools.tune.options import TuneOptions
from tokenmerge_tools.tune.plans import Budget, SearchedPlan, neighbours, rule_plan
from tokenmerge_tools.tune.rounds import CannotRunError, Rounds, gain, look_of
from tokenmerge_tools.tune.search import search
from tokenmerge_tools.variants.variant import FEWER_STEPS, Variant

# Share of the time after which no further plan is tried.
_SEARCH = 0.7
# A search that draws fewer images than this finds little.
_PICTURES = 60


class _OutOfTime(Exception):
    pass


@dataclasses.dataclass(frozen=True)
class TuneProgress:
    """The progress of a search: seconds spent, also in earlier runs, and the best plan so far."""

    spent: float
    budget: float
    running: str
    best: str


def tune(
    options: TuneOptions,
    on_progress: Callable[[TuneProgress], None] = lambda progress: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Search:
    """Search for a plan until the time is spent, no plan is left, or the user presses Ctrl-C.

    Every measurement is written to the results file at once. The same command continues the search, also with
    a larger budget.
    """
    require_diffusers("tokenmerge tune")
    device = resolve_device(options.device)
    wanted = options.evaluation(prompts=len(options.evaluation().read_prompts()))
    evaluation = plan_evaluation(wanted, device)
    items = tuple(sorted(evaluation.items, key=lambda item: item.seed)[: options.items])
    evaluation = dataclasses.replace(evaluation, items=items)
    metrics = load_metrics(wanted.wanted(), evaluation.prompts, on_note)
    prepare_folder(evaluation.store.folder)
    with ResultsFile(options.records, TuneRecord) as file:
        for note in file.notes:
            on_note(note)
        found = Search(options, Rounds(options, evaluation, metrics, device), file, on_progress, on_note)
        with contextlib.suppress(KeyboardInterrupt):
            found.find()
            found.check()
            found.complete = True
        return found


class Search:
    """One search, and its measurements so far.

    ``rule`` is the plan of the default method, ``best`` the plan that is closest in the search. ``snr`` has
    the closeness in dB of the final latents, by plan and item, and ``looks`` the timed images of the check.
    ``was_search`` says whether there was time to look beyond the plans that a search begins with. ``enough``
    are the seconds in which a search is worth its while here. ``complete`` says whether it ended by itself.
    """

    def __init__(
        self,
        options: TuneOptions,
        rounds: Rounds,
        file: ResultsFile[TuneRecord],
        on_progress: Callable[[TuneProgress], None],
        on_note: Callable[[str], None],
    ) -> None:
        self.options = options
        self.rounds = rounds
        self.file = file
        self.on_progress = on_progress
        self.on_note = on_note
        evaluation = rounds.evaluation
        self.evaluation = evaluation
        # The key has the metric's network, but not the budget and the speed-up: others reuse all images.
        conditions = key_of({**evaluation.store.conditions, "metrics": dict(rounds.metrics.networks)})
        texts = [f"{item.prompt}, seed {item.seed}" for item in evaluation.items]
        self.conditions = key_of({"conditions": conditions, "items": texts})
        own = [one for one in file.records.values() if one.conditions == self.conditions]
        self.snr = {(one.name, one.item): float(one.values["snr"]) for one in own if one.about == "plan"}
        self.looks = [look_of(one, options.metric_name) for one in own if one.about == "look"]
        self.spent = sum(float(one.values["seconds"]) for one in own if one.about in ("plan", "dense"))
        self.spent += sum(look.cost for look in self.looks)
        self.dense_seconds = self._seconds_of_dense()
        self.facts = self._facts(own)
        self.rule = rule_plan(self.facts, options.speedup)
        self.best = self.rule
        self.speedup = speedup_of(self.facts, self.rule.config)
        self.budget = Budget(self.facts, self.speedup)
        if self.speedup <= 1:
            raise ConfigError(
                "size: no plan merges tokens or reuses steps of this model at this size and number of steps; "
                "raise --size or --steps"
            )
        self.failed: set[str] = set()
        self.compared: set[str] = set()
        self.was_search = False
        self.complete = False
        self.enough = math.inf

    @property
    def counted(self) -> tuple[float, float]:
        """The speed-ups of the rule's plan and the best one by operations."""
        return self.speedup, self.budget.counted(self.best)

    @property
    def tried(self) -> int:
        """Number of plans that were compared with the rule's."""
        return len(self.compared - {self.rule.name})

    @property
    def gain(self) -> tuple[float, float] | None:
        """How much closer the best plan is than the rule's on the prompts of the check, with its error."""
        return gain(self.looks, self.best.name, self.rule.name, self.options.metric_name)

    @property
    def chosen(self) -> SearchedPlan:
        """The best plan, unless the check says that it is not closer than the rule's by a standard error."""
        found = self.gain
        is_closer = found is None or (found[0] > 0 and not (found[0] < found[1] < math.inf))
        return self.best if is_closer else self.rule

    @property
    def reaches(self) -> bool:
        """Whether the wanted speed-up can be reached, by operations."""
        return self.speedup + ROUNDING >= self.options.speedup

    @property
    def found_for(self) -> FoundFor:
        """The kind of generation."""
        rounds = self.rounds
        names = type(denoiser_of(rounds.pipe)).__name__, type(rounds.pipe.scheduler).__name__
        return FoundFor(names[0], *rounds.latent, self.options.steps, names[1], rounds.call.guidance)

    def find(self) -> None:
        """Search by final latents until no neighbour is left, or the time for it is spent."""
        self._announce(self.dense_seconds)
        try:
            plans = search(
                [self.rule],
                lambda plan, random: neighbours(plan, self.budget, random),
                self._closeness,
                self.options.items - self.options.checked,
            )
            for number, self.best in enumerate(plans):
                self.was_search = number > 0
        except _OutOfTime:
            pass

    def check(self) -> None:
        """Draw the prompts that were kept back with the best plan, the rule's and fewer steps, and time them.

        The first prompt is drawn however little time is left.
        """
        first = self.options.items - self.options.checked
        configs = {plan.name: plan.config for plan in (self.best, self.rule)}
        for item in range(first, self.options.items):
            done = {look.name for look in self.looks if look.item == item}
            wanted = {name: one for name, one in self.variants().items() if name not in done | self.failed}
            if not wanted or (item > first and self.spent >= self.options.within):
                continue
            self._say(f"check on prompt {item - first + 1} of {self.options.checked}")
            for name, values in self.rounds.draw(item, wanted, configs, self._fail):
                if self.options.metric_name not in values["metrics"]:
                    self._fail(name, f"its image has no finite {self.options.metric_name}")
                    continue
                record = self._append("look", name, item, values)
                self.looks.append(look_of(record, self.options.metric_name))
                self.spent += values["cost"]

    def _facts(self, records: Sequence[TuneRecord]) -> RunFacts:
        """Return the facts of the generation. What was measured for them in an earlier run holds on."""
        hosts = find_hosts(self.rounds.pipe)
        height, width = self.rounds.latent
        method = DefaultMethod.of(self.rounds.pipe, hosts, self.options.speedup)
        denoiser = next((host for host in hosts if not host.controlnet), hosts[0])
        measured = [one.values for one in records if one.about == "facts"]
        if not measured:
            measured = [self._append("facts", "", -1, {"fewest_tokens": method.facts.fewest_tokens}).values]
        return dataclasses.replace(
            method.facts,
            grid=denoiser.grid_at(height, width),
            steps=self.options.steps,
            guidance=self.rounds.call.guidance,
            fewest_tokens=fewest_tokens_of(measured[-1]),
        )

    def _seconds_of_dense(self) -> float:
        record = self.file.records.get(self._record("dense", "", 0, {}).key)
        if record is None:
            self.on_progress(TuneProgress(self.spent, self.options.within, "dense", "default method"))
            began = time.perf_counter()
            self.rounds.dense(0)
            record = self._append("dense", "", 0, {"seconds": time.perf_counter() - began})
            self.spent += record.values["seconds"]
        return float(record.values["seconds"])

    def _announce(self, dense: float) -> None:
        """Say how many images fit into the time, and how much a search needs."""
        plan = dense / self.speedup
        check = self.options.checked * (3 * dense + 2 * plan)
        prompts = self.options.items - self.options.checked
        self.enough = max((prompts * dense + _PICTURES * plan) / _SEARCH, check / (1 - _SEARCH))
        pictures = max(0, int((_SEARCH * self.options.within - prompts * dense) / plan))
        few = ""
        if pictures < _PICTURES:
            few = (
                f"; that is too few for a search, which needs about {_PICTURES}: give --within "
                f"{math.ceil(self.enough / 60)}min"
            )
        self.on_note(
            f"a dense image takes {dense:.1f} s here, so the search can draw about {pictures} images{few}"
        )

    def _closeness(self, plan: SearchedPlan, item: int) -> float:
        """Return how close the final latents are, from the records or a new image."""
        if plan.name in self.failed:
            return -math.inf
        if (plan.name, item) not in self.snr:
            if self.spent >= _SEARCH * self.options.within:
                raise _OutOfTime
            self._say(plan.name)
            began = time.perf_counter()
            try:
                found = self.rounds.snr(item, plan.config)
            except CannotRunError as error:
                self._fail(plan.name, str(error))
                return -math.inf
            seconds = time.perf_counter() - began
            self._append("plan", plan.name, item, {"snr": found, "seconds": seconds})
            self.snr[plan.name, item] = found
            self.spent += seconds
        self.compared.add(plan.name)
        return self.snr[plan.name, item]

    def variants(self) -> dict[str, Variant]:
        """Return what the check draws: the best plan, the rule's, and fewer steps at its counted speed."""
        found = {plan.name: variant_of(plan.config) for plan in (self.best, self.rule)}
        steps = round(self.options.steps / self.speedup)
        if steps:
            fewer = Variant(FEWER_STEPS, (("steps", steps),))
            found[fewer.label] = fewer
        return found

    def _fail(self, name: str, reason: str) -> None:
        if name == self.rule.name:
            raise ConfigError(
                f"the default method cannot run here: {reason}; change --size, --steps, --dtype or --model"
            )
        self.failed.add(name)
        self.on_note(f"{name} cannot run here: {reason}")

    def _say(self, running: str) -> None:
        self.on_progress(TuneProgress(self.spent, self.options.within, running, self.best.name))

    def _append(self, about: str, name: str, item: int, values: Mapping[str, object]) -> TuneRecord:
        record = self._record(about, name, item, values)
        self.file.append(record)
        return record

    def _record(self, about: str, name: str, item: int, values: Mapping[str, object]) -> TuneRecord:
        return TuneRecord(conditions=self.conditions, about=about, name=name, item=item, values=values)


def variant_of(config: ToMeConfig) -> Variant:
    """Return settings as a variant, which draws and stores images."""
    return Variant("tome", tuple(config.changed().items()))
