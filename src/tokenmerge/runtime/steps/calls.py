"""Recognises a call of the model by what it is given: which call of the step before it continues.

A pipeline may call a model several times in a step: for prompts, for tiles, or to look at it once more. What
was cached in one call is of no use to another. Their order does not tell them apart: guidance may begin in a
later step, with a call before the one that was there, and tiles may come in another order, or move.

Two things tell. The text is the same tensor in every step, or has the same values. And a scheduler changes a
sample little from step to step, so that its fine detail, which is mostly noise, stays alike; that of another
sample is not alike at all.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenmerge.ops.once import version_of

Shape = tuple[object, ...]  # of the inputs of a call; what is cached for one does not fit another

# Parts of the names of arguments that say what an image should show. They stay the same over the steps.
_CONDITIONS = (
    "encoder_hidden_states",
    "pooled",
    "embed",
    "class_labels",
    "cap_feats",
    "context",
    "added_cond_kwargs",
)
_POSITIONS = 4096  # of each image, at which its detail is compared, or a few more
_FEWEST = 32  # positions that changed, with which a comparison says something
# The correlation of the detail before and after a step. Without new noise it is above 0.8 in each of the
# schedulers of diffusers that fit the bundled model, in 4 steps or 12. That of two samples is 0 ± 0.03.
_LEAST = 0.1
_CLEARLY_ALIKE = 4  # times the least correlation: that of a sample as the noise lets one expect it
_CLEARLY = 0.25  # how much more it has to be with another sample, for that to be the one before
_DEVIATIONS = 5  # both in standard deviations of a correlation of few positions, and at most …
_MOST_BY_CHANCE = 0.5
# The share of a detail that rounding changes, where it is a sum of some others. In float32 it is at most 2e-7
# in steps of DDIM and of flow matching, at guidance scales up to 30. Half precision hides what is looked for.
_ROUNDING = 8 * torch.finfo(torch.float32).eps
_TINY = torch.finfo(torch.float32).tiny
_MOST_QUESTIONS = 4  # to a device in a generation, where conditions are made anew in each step


@dataclasses.dataclass(frozen=True, eq=False)
class Condition:
    """A tensor that says what an image should show, as a call was given it."""

    tensor: Tensor
    version: int | None  # how often it had been changed, or None if nobody counts

    def is_same(self, other: Condition) -> bool:
        """Return whether two conditions are one tensor, or the same part of one, found without its values."""
        if self.version != other.version:
            return False
        one = self.tensor
        two = other.tensor
        return one is two or (_place(one) is not None and _place(one) == _place(two))

    def equals(self, before: Condition) -> bool:
        """Return whether an earlier condition has the same values; on a device, this waits for it."""
        one = self.tensor
        two = before.tensor
        if before.version != version_of(two):  # its values are gone: nothing tells them apart
            return True
        same = one.shape == two.shape and one.dtype == two.dtype and one.device == two.device
        return same and (one.is_meta or torch.equal(one, two))


def _place(tensor: Tensor) -> tuple[object, ...] | None:
    """Return where a tensor lies in memory, and how, or None if it does not say."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return None
    memory = tensor.untyped_storage().data_ptr()
    return (memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype) if memory else None


@dataclasses.dataclass(frozen=True, eq=False)
class Given:
    """What one call of a model is given."""

    shape: Shape = ()
    conditions: Mapping[str, Condition] = dataclasses.field(default_factory=dict)
    sample: weakref.ref[Tensor] | None = None  # None if it is no tensor
    detail: Tensor | None = None  # of the sample, by :func:`detail_of`, if it is compared
    waits: bool = False  # whether comparing values waits for a device
    # The deviation of the noise in the detail that the step before has added; None: it may be any.
    noise: float | None = 0.0

    def has_same_conditions(self, other: Given) -> bool:
        """Return whether two calls are given the very same conditions."""
        pairs = _pairs(self, other)
        return pairs is not None and all(one.is_same(two) for one, two in pairs)

    def has_equal_conditions(self, before: Given) -> bool:
        """Return whether an earlier call was given conditions of the same values."""
        pairs = _pairs(self, before)
        return pairs is not None and all(one.is_same(two) or one.equals(two) for one, two in pairs)


def _pairs(one: Given, other: Given) -> list[tuple[Condition, Condition]] | None:
    if one.conditions.keys() != other.conditions.keys():
        return None
    return [(condition, other.conditions[name]) for name, condition in one.conditions.items()]


def conditions_in(arguments: Mapping[str, Any]) -> dict[str, Condition]:
    """Return the conditions among the arguments of a call, by name."""
    return {
        name: Condition(tensor, version_of(tensor))
        for key, value in arguments.items()
        if any(part in key for part in _CONDITIONS)
        for name, tensor in _tensors_in(key, value)
    }


def _tensors_in(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in an argument, each with a name."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors_in(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from _tensors_in(f"{name}.{place}", inner)


def detail_of(sample: Tensor | Sequence[Tensor]) -> Tensor | None:
    """Return the fine detail of each image at some positions, ``[b, positions]``, or None.

    It is how neighbours differ along the last two axes, which takes away what is smooth. On a device, this
    waits for it.
    """
    if not isinstance(sample, Tensor):
        each = [detail_of(one.unsqueeze(0)) for one in sample]
        known = [detail for detail in each if detail is not None]
        alike = len(known) == len(each) and len({detail.shape for detail in known}) == 1
        return torch.cat(known) if alike else None
    if sample.is_meta or sample.ndim < 3 or not sample.is_floating_point():
        return None
    detail = sample.detach().float()
    for axis in (-1, -2):
        if detail.shape[axis] > 1:
            detail = detail.diff(dim=axis)
    detail = detail.flatten(1)
    stride = max(1, detail.shape[1] // _POSITIONS)
    return detail[:, ::stride].clone().cpu()


def noise_in_detail(sample: Tensor | Sequence[Tensor], deviation: float) -> float:
    """Return the deviation of noise in :func:`detail_of` a sample, from that in the sample."""
    sides = sample.shape[-2:] if isinstance(sample, Tensor) else sample[0].shape[-2:]
    return deviation * 2 ** (sum(side > 1 for side in sides) / 2)


def continued(
    now: Tensor | None,
    before: Sequence[Tensor | None],
    noise: float | None,
    outputs: Sequence[Sequence[Tensor]] = (),
) -> int | None:
    """Return which of some samples of the step before became a sample, or None.

    The arguments are the details of the sample and of those before, in the order in which they are expected,
    the deviation of the noise that the step has added to the detail, and for each of those before the details
    of what the model returned for it, as far as they are known.
    A scheduler that adds noise may leave nothing of the detail. Then a sample is refused only where another
    one is more like it.
    """
    known = [detail for detail in before if detail is not None and now is not None]
    if now is None or len(known) < len(before) or any(detail.shape != now.shape for detail in known):
        return 0
    places = range(len(known))
    made = outputs or [()] * len(known)
    follows = (place for place in places if _follows(now, known, place, noise, made[place]))
    return next(follows, None)


def _follows(
    now: Tensor, before: Sequence[Tensor], place: int, noise: float | None, outputs: Sequence[Tensor]
) -> bool:
    """Return whether a sample follows from that at a place: all images of the batch, in their order."""
    # Masks and images beside the latents stay as they are.
    moved = (now != before[place]).any(dim=0)
    positions = int(moved.sum())
    if positions < _FEWEST:
        return True
    images = len(now)
    alike = _directions(now[:, moved]) @ _directions(torch.cat(list(before))[:, moved]).T
    similarity = alike[:, place * images : (place + 1) * images].diagonal().clone()
    chance = min(_DEVIATIONS / positions**0.5, _MOST_BY_CHANCE)
    least = max(_LEAST, chance)
    for image in (similarity < least).nonzero().flatten().tolist():
        same = [other for other, one in enumerate(before[place]) if torch.equal(one, before[place][image])]
        columns = [before[place][image], *(made[other] for made in outputs for other in same)]
        similarity[image] = _explained(now[image][moved], torch.stack(columns, dim=1)[moved])
    # Of what is not finite, or has no detail, nothing is known.
    other = (alike.nan_to_num().amax(dim=1) > similarity + max(_CLEARLY, chance)) & (similarity != 0)
    strange = (similarity < least) & (similarity != 0) & _should_be_alike(now[:, moved], noise, least)
    return not bool((other | strange).any())


def _should_be_alike(now: Tensor, noise: float | None, least: float) -> Tensor:
    """Return for each image whether enough of its detail is from the step before, and no new noise.

    If a share ``s`` of the variance is no new noise, the correlation with what the detail was made of is the
    square root of ``s``.
    """
    if noise is None:
        return torch.zeros(len(now), dtype=torch.bool)
    variance = now.square().mean(dim=1).clamp(min=_TINY)
    return 1 - noise**2 / variance > (_CLEARLY_ALIKE * least) ** 2


def _explained(now: Tensor, columns: Tensor) -> Tensor:
    """Return the correlation of a detail with the sum of some others that comes closest to it.

    A scheduler makes a sample of the one before and of what the model returned for it. Where guidance is very
    strong, the latter is most of it.
    """
    if not (columns.isfinite().all() and now.isfinite().all()):
        return now.new_zeros(())  # nothing is known
    fitted = _fitted(columns, now)
    length = torch.linalg.vector_norm(now.double()).clamp(min=_TINY)
    return (torch.linalg.vector_norm(fitted) / length).to(now.dtype)


def _fitted(columns: Tensor, now: Tensor) -> Tensor:
    """Return the sum of some columns that comes closest to a detail: float64.

    The outputs of two prompts may be nearly equal, and guidance takes a multiple of their difference. Other
    drivers than this one lose the difference.
    """
    columns = columns.double()
    found = torch.linalg.lstsq(columns, now.double().unsqueeze(1), driver="gelsd")
    return (columns @ found.solution).squeeze(1)


def _directions(details: Tensor) -> Tensor:
    lengths = torch.linalg.vector_norm(details, dim=1, keepdim=True)
    return details / lengths.clamp(min=_TINY)


def is_made_of(now: Tensor | None, calls: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Return whether a sample is what a scheduler made of the calls of one step.

    The arguments are the details of the sample, and for each call those of its sample and of what the model
    returned. DDIM and flow matching multiply each by a number, and add them. A sample that is one of these
    itself is not made of them. What another kind of scheduler makes is not recognised.
    """
    if now is None or now.shape[1] < _FEWEST:
        return False
    calls = [call for call in calls if call[0].shape[1:] == now.shape[1:]]
    if not calls:
        return False
    samples, outputs = (torch.cat(details) for details in zip(*calls, strict=True))
    nearest = (_directions(now) @ _directions(samples).T).abs().nan_to_num().argmax(dim=1)
    return all(
        _left_of(image, [sample]) > _ROUNDING
        # The batch holds a sample several times, for as many prompts.
        and _left_of(image, [sample, *outputs[(samples == sample).all(dim=1)]]) <= _ROUNDING
        for image, sample in zip(now, samples[nearest], strict=True)
    )


def _left_of(now: Tensor, others: Sequence[Tensor]) -> float:
    """Return the share of a detail that no sum of some others explains."""
    columns = torch.stack(list(others), dim=1)
    if not (columns.isfinite().all() and now.isfinite().all()):
        return 1.0
    left = now.double() - _fitted(columns, now)
    return float(torch.linalg.vector_norm(left) / torch.linalg.vector_norm(now.double()).clamp(min=_TINY))


class CallNumbers:
    """The numbers of the calls of one model in one generation.

    A call has the number of the call of the step before that it continues, or else a new one.
    """

    def __init__(self) -> None:
        self.made: list[int] = []  # in the running step, in their order
        self.misfits = 0  # calls with the text of a call before, whose sample follows from none of these
        # Steps in a row with a call whose text no call of the step before had, in place of one of these.
        self.texts_changed = 0
        self._has_new_text = False  # the running step has such a call
        self.has_tiles = False  # calls of the step before had the same conditions, and different samples
        self.has_calls_after = False  # a call was made after a step, on what that step had made
        self._joined = False  # a call of the running step continued none, on a sample of its own
        self._joined_before = False  # so did one of the step before
        self._before: list[int] = []  # as ``made``, in the step before
        self._given: dict[int, Given] = {}  # by number
        self._outputs: dict[int, Tensor] = {}  # likewise, the detail of what the model returned
        # The details of the samples of the running step, and of what the model returned for them.
        self._ended: list[tuple[Tensor, Tensor]] = []
        self._next = 0
        self._asked = 0  # how often a device was asked for the values of conditions

    def begin_step(self) -> list[int]:
        """Begin a step. Return the numbers of the calls that the step before did not make."""
        stale = [number for number in self._given if number not in self.made]
        # Guidance that begins or ends makes more calls, or fewer.
        self.texts_changed = self.texts_changed + 1 if stale and self._has_new_text else 0
        self._has_new_text = False
        self._before = [number for number in self.made if number in self._given]
        self.made = []
        self._ended = []
        self.has_tiles = _has_tiles([self._given[number] for number in self._before])
        self._joined_before = self._joined
        self._joined = False
        self.forget(stale)
        return stale

    def compares(self, given: Given) -> bool:
        """Return whether the sample of a call is compared, although this waits for a device.

        That of a call is which joins in a step, on a sample of its own, and that with which the next step
        begins: it shows whether the other call was made after the step.
        """
        if self.has_tiles or not self.made:
            return self.has_tiles or self._joined_before
        knows = self.has_calls_after or any(_have_one_sample(given, one) for one in self._made_before())
        joins = not knows and not self._may_continue(given)
        self._joined = self._joined or joins
        return joins

    def is_after_step(self, given: Given) -> bool:
        """Return whether a call is given what the running step made, so that it is none of this step.

        Where a scheduler adds noise, or numbers are rounded, such a call does not show it. The next step
        does, which begins with the same sample. From then on, a call on a sample that no call of the step
        had, which continues no call of the step before, counts as another such call.
        """
        if is_made_of(given.detail, self._ended):
            return True
        if not self.has_calls_after or not self.made:
            return False
        if any(_have_one_sample(given, one) for one in self._made_before()):
            return False
        alike = self._with_text_of(given, self._may_continue(given))
        return self._place(given, alike) is None

    def _made_before(self) -> list[Given]:
        """Return what the calls of the running step were given, as far as it is known."""
        return [self._given[number] for number in self.made if number in self._given]

    def begin_call(self, given: Given) -> int:
        """Begin a call, and return its number."""
        if not self.made:
            self._leave_out_calls_after_step(given)
        number = self._continued(given)
        if number is None:
            number = self._next
            self._next += 1
        self.made.append(number)
        self._given[number] = given
        return number

    def _leave_out_calls_after_step(self, given: Given) -> None:
        """Leave out the calls of the step before on the sample with which the running one begins.

        They were made after that step. Calls before them were its own, on another sample.
        """
        for place, number in enumerate(self._before):
            if _have_equal_details(given, self._given[number]):
                self.has_calls_after = self.has_calls_after or place > 0
                self._before = self._before[:place] or self._before
                return

    def _continued(self, given: Given) -> int | None:
        """Return the number of the call of the step before that a call continues, or None."""
        numbers = self._may_continue(given)
        alike = self._with_text_of(given, numbers)
        if not alike:
            self._has_new_text = self._has_new_text or bool(numbers)
            return None
        number = self._place(given, alike)
        self.misfits += number is None
        return number

    def _may_continue(self, given: Given) -> list[int]:
        """Return the calls of the step before with the shape of a call, which no other call continues."""
        numbers = [number for number in self._before if number not in self.made]
        return [number for number in numbers if self._given[number].shape == given.shape]

    def _with_text_of(self, given: Given, numbers: list[int]) -> list[int]:
        """Return those of some calls that were given the conditions of a call."""
        alike = [number for number in numbers if given.has_same_conditions(self._given[number])]
        return alike or self._with_equal_conditions(given, numbers)

    def _place(self, given: Given, alike: list[int]) -> int | None:
        """Return that of some calls from whose sample that of a call follows."""
        if not alike:
            return None
        details = [self._given[number].detail for number in alike]
        place = continued(given.detail, details, given.noise, [self._outputs_for(number) for number in alike])
        return None if place is None else alike[place]

    def _with_equal_conditions(self, given: Given, numbers: list[int]) -> list[int]:
        """Return those of some calls whose conditions have the same values as those of a call.

        A device is asked a few times in a generation. After that, calls are told apart by their order.
        """
        if given.waits:
            if self._asked >= _MOST_QUESTIONS:
                return numbers
            self._asked += len(numbers)
        return [number for number in numbers if given.has_equal_conditions(self._given[number])]

    def note_result(self, number: int, result: Any) -> None:
        """Note what the model returned in the running call, if samples are compared."""
        given = self._given.get(number)
        output = result if isinstance(result, Tensor) else result[0]
        self._outputs.pop(number, None)
        if given is not None and given.detail is not None and isinstance(output, Tensor | list | tuple):
            detail = detail_of(output)
            if detail is not None and detail.shape == given.detail.shape:
                self._outputs[number] = detail
                self._ended.append((given.detail, detail))

    def _outputs_for(self, number: int) -> list[Tensor]:
        """Return what the model returned in a call of the step before, and in others on its sample."""
        sample = self._given[number].sample
        same = [other for other in self._before if other == number or self._is_on(other, sample)]
        return [self._outputs[other] for other in same if other in self._outputs]

    def _is_on(self, number: int, sample: weakref.ref[Tensor] | None) -> bool:
        given = self._given.get(number)
        return given is not None and sample is not None and given.sample is sample

    def forget(self, numbers: Collection[int]) -> None:
        """Drop what the calls with some numbers were given, and what the model returned."""
        self._outputs = {number: made for number, made in self._outputs.items() if number not in numbers}
        self._given = {number: given for number, given in self._given.items() if number not in numbers}


def _has_tiles(calls: Sequence[Given]) -> bool:
    # A tensor has one weak reference, also when it is gone.
    return any(
        None not in (one.sample, two.sample)
        and one.sample is not two.sample
        and one.shape == two.shape
        and one.has_same_conditions(two)
        for one, two in itertools.combinations(calls, 2)
    )


def _have_one_sample(one: Given, two: Given) -> bool:
    """Return whether two calls are on one sample, as far as it is known."""
    return (one.sample is not None and one.sample is two.sample) or _have_equal_details(one, two)


def _have_equal_details(one: Given, two: Given) -> bool:
    """Return whether each image of a call has the detail of one of another call, at any scale."""
    if one.detail is None or two.detail is None or one.detail.shape[1:] != two.detail.shape[1:]:
        return False
    nearest = (_directions(one.detail.double()) @ _directions(two.detail.double()).T).abs().amax(dim=1)
    return bool((1 - nearest.square() <= _ROUNDING**2).all())
