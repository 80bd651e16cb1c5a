"""Runs a search: resolves the settings, measures rounds until the search is over, and decides."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError, TokenMergingError
from tokenmerge.models.find import find_hosts
from tokenmerge.report import check_merging, merges_tokens, predict
from tokenmerge_tools.evaluate.evaluation import Evaluation, plan_evaluation
from tokenmerge_tools.evaluate.metrics import load_metrics
from tokenmerge_tools.files import prepare_folder
from tokenmerge_tools.pipelines.loading import require_diffusers
from tokenmerge_tools.pipelines.settings import resolve_device
from tokenmerge_tools.records.file import ResultsFile
from tokenmerge_tools.records.kinds import TuneRecord, key_of
from tokenmerge_tools.tune.candidates import AUTO_FAMILY, Candidate, candidates, what_it_does
from tokenmerge_tools.tune.decision import Decision, decide
from tokenmerge_tools.tune.goal import Goal, TuneOptions
from tokenmerge_tools.tune.measurements import Estimate, Look, estimates, look_of
from tokenmerge_tools.tune.rounds import Failed, Outcome, Rounds
from tokenmerge_tools.tune.search import next_round

# Operations are counted if that takes less than this share of the time of a dense picture.
_WORTH_COUNTING = 0.15
# Assumed time to count the operations of a setting, until it is measured.
_SECONDS_TO_COUNT = 0.5


@dataclasses.dataclass(frozen=True)
class TuneProgress:
    """The progress of a search: seconds spent, also in earlier runs, and the best setting so far, if any."""

    spent: float
    budget: float
    running: str
    best: Estimate | None


@dataclasses.dataclass(frozen=True)
class Search:
    """A search that is over (``complete``), or was interrupted.

    ``candidates`` are the settings that were tried or could have been, by name. ``configs`` has the resolved
    settings of those that merge or reuse steps with this package. The decision is None if none was measured.
    ``model`` is the class of the denoiser, and ``latent`` the (height, width) of the latents.
    """

    options: TuneOptions
    evaluation: Evaluation
    candidates: Mapping[str, Candidate]
    configs: Mapping[str, ToMeConfig]
    looks: Sequence[Look]
    decision: Decision | None
    model: str
    latent: tuple[int, int]
    scheduler: str
    complete: bool

    @property
    def goal(self) -> Goal:
        """What was wanted."""
        return self.options.goal


def tune(
    options: TuneOptions,
    on_progress: Callable[[TuneProgress], None] = lambda progress: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Search:
    """Search for settings until the budget is spent, all prompts are drawn, or the user presses Ctrl-C.

    Every measurement is written to the results file at once. The same command continues the search, also with
    a larger budget.
    """
    require_diffusers("tokenmerge tune")
    device = resolve_device(options.device)
    count = len(options.evaluation().read_prompts())
    wanted = options.evaluation(prompts=count)
    evaluation = plan_evaluation(wanted, device)
    items = tuple(sorted(evaluation.items, key=lambda item: item.seed)[: options.items])
    evaluation = dataclasses.replace(evaluation, items=items)
    metrics = load_metrics(wanted.wanted(), [prompt.text for prompt in evaluation.prompts], on_note)
    prepare_folder(evaluation.store.folder)
    with ResultsFile(options.records, TuneRecord) as file:
        for note in file.notes:
            on_note(note)
        run = _Searching(options, Rounds(options, evaluation, metrics, device), file, on_progress, on_note)
        try:
            run.search()
        except KeyboardInterrupt:
            return run.result(complete=False)
        return run.result(complete=True)


class _Searching:
    """One search, and its measurements so far."""

    def __init__(
        self,
        options: TuneOptions,
        rounds: Rounds,
        file: ResultsFile[TuneRecord],
        on_progress: Callable[[TuneProgress], None],
        on_note: Callable[[str], None],
    ) -> None:
        self.options, self.goal, self.rounds, self.file = options, options.goal, rounds, file
        self.on_progress, self.on_note = on_progress, on_note
        evaluation = rounds.evaluation
        # The key has the metric's network, but not the budget and the goal: another goal reuses all pictures.
        self.conditions = key_of({**evaluation.store.conditions, "metrics": dict(rounds.metrics.networks)})
        self.texts = [f"{item.prompt.text}, seed {item.seed}" for item in evaluation.items]
        self.conditions = key_of({"conditions": self.conditions, "items": self.texts})
        self.failed: set[str] = set()
        self.candidates: dict[str, Candidate] = {}
        self.configs: dict[str, ToMeConfig] = {}
        self.seconds_to_count = _SECONDS_TO_COUNT

    @property
    def looks(self) -> list[Look]:
        """All measurements of settings that are in the search."""
        found = (self._of(record) for record in self.file.records.values())
        return [look for look in found if look is not None and look.name in self.candidates]

    def _of(self, record: TuneRecord) -> Look | None:
        fits = record.conditions == self.conditions and record.about == "look"
        return look_of(record, self.goal) if fits and record.item < len(self.texts) else None

    def search(self) -> None:
        """Measure rounds until the search is over."""
        self._resolve()
        while True:
            open_ = [one.entry for one in self.candidates.values() if one.name not in self.failed]
            budget = self.options.within - self._seconds_of_counting()
            following = next_round(open_, self.looks, self.goal, budget, len(self.texts), self._counted())
            if following is None:
                return
            if following.item == 0 and self._count(following.names):
                continue
            self._say(following.names[0])
            chosen = [self.candidates[name] for name in following.names]
            left = list(following.names)
            for found in self.rounds.draw(following.item, chosen, self._all_configs()):
                left.remove(found.name)
                if isinstance(found, Outcome) and self.goal.metric not in found.metrics:
                    found = Failed(found.name, f"its picture has no finite {self.goal.metric}")
                if isinstance(found, Failed):
                    self.failed.add(found.name)
                    self.on_note(f"{found.name} cannot run here: {found.reason}")
                else:
                    values = {name: getattr(found, name) for name in ("seconds", "dense_seconds", "cost")}
                    self._append(
                        "look", found.name, following.item, {**values, "metrics": dict(found.metrics)}
                    )
                if left:
                    self._say(left[0])

    def result(self, complete: bool) -> Search:
        """Return the search with its decision."""
        pipe, denoiser = self.rounds.pipe, self.rounds.denoiser
        return Search(
            self.options,
            self.rounds.evaluation,
            self.candidates,
            self.configs,
            self.looks,
            self._decide(),
            type(denoiser).__name__,
            self.rounds.latent,
            type(pipe.scheduler).__name__,
            complete,
        )

    def _resolve(self) -> None:
        """Resolve the settings of each candidate on this model. Leave out equal and impossible ones."""
        seen: dict[object, str] = {}
        hosts = find_hosts(self.rounds.pipe)
        for one in candidates(self.goal, self.options.steps):
            record = self.file.records.get(self._record("settings", one.name, -1, {}).key)
            try:
                if record is not None:
                    config: ToMeConfig | None = ToMeConfig.from_dict(record.values["config"])
                else:
                    height, width = self.rounds.latent
                    config = one.variant.config(
                        self.rounds.pipe,
                        height=height,
                        width=width,
                        steps=one.variant.steps(self.options.steps),
                        guidance=self.rounds.call.guidance,
                    )
                if config is None:
                    self.candidates[one.name] = one
                    continue
                check_merging(hosts, config, self.rounds.latent)
                acting = what_it_does(
                    config, self.options.steps, merges_tokens(hosts, config, self.rounds.latent)
                )
                if acting is None or acting in seen:
                    continue
            except TokenMergingError:
                continue
            seen[acting] = one.name
            if record is None:
                self._append("settings", one.name, -1, {"config": config.to_dict()})
            self.candidates[one.name], self.configs[one.name] = one, config
        if not self.configs:
            raise ConfigError(
                "size: no setting merges tokens or reuses steps of this model at this size and number of "
                "steps; raise --size or --steps"
            )

    def _all_configs(self) -> dict[str, ToMeConfig | None]:
        return {name: self.configs.get(name) for name in self.candidates}

    def _counts(self) -> list[TuneRecord]:
        found = self.file.records.values()
        return [one for one in found if one.about == "counted" and one.conditions == self.conditions]

    def _seconds_of_counting(self) -> float:
        return sum(float(record.values.get("seconds", 0.0)) for record in self._counts())

    def _counted(self) -> dict[str, float]:
        found = {record.name: float(record.values["speedup"]) for record in self._counts()}
        for one in self.candidates.values():
            if (steps := one.variant.steps(self.options.steps)) < self.options.steps:
                found[one.name] = self.options.steps / steps
        return found

    def _count(self, names: Sequence[str]) -> bool:
        """Count the operations of settings if that is cheap. Return whether any was counted."""
        looks, counted = self.looks, self._counted()
        if not looks:
            return False
        dense = looks[-1].dense_seconds
        any_counted = False
        for name in names:
            config = self.configs.get(name)
            if config is None or name in counted:
                continue
            if self.seconds_to_count > _WORTH_COUNTING * dense:
                continue
            steps = self.options.steps if config.follows_steps else 1
            began = time.perf_counter()
            report = predict(self.rounds.denoiser, config, *self.rounds.latent, 2, steps)
            self.seconds_to_count = time.perf_counter() - began
            merged = report.flops_merged if report.flops_mean is None else report.flops_mean
            values = {"speedup": report.flops_dense / merged, "seconds": self.seconds_to_count}
            self._append("counted", name, -1, values)
            any_counted = True
        return any_counted

    def _decide(self) -> Decision | None:
        looks = [look for look in self.looks if look.name in self.configs]
        preferred = {one.name for one in self.candidates.values() if one.entry.family == AUTO_FAMILY}
        return decide(looks, self.goal, preferred) if looks else None

    def _say(self, running: str) -> None:
        looks, decision = self.looks, self._decide()
        best = None if decision is None else estimates(looks)[decision.name]
        spent = sum(look.cost for look in looks) + self._seconds_of_counting()
        self.on_progress(TuneProgress(spent, self.options.within, running, best))

    def _append(self, about: str, name: str, item: int, values: Mapping[str, object]) -> None:
        self.file.append(self._record(about, name, item, values))

    def _record(self, about: str, name: str, item: int, values: Mapping[str, object]) -> TuneRecord:
        return TuneRecord(conditions=self.conditions, about=about, name=name, item=item, values=values)
