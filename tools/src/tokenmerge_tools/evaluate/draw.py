"""Draws the pictures that are missing."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError
from tokenmerge_tools.evaluate.drawn import Drawn
from tokenmerge_tools.evaluate.picture_store import PictureStore
from tokenmerge_tools.evaluate.prompts import Item
from tokenmerge_tools.failures import is_out_of_memory
from tokenmerge_tools.pipelines.call import PipelineCall
from tokenmerge_tools.pipelines.loading import denoiser_of
from tokenmerge_tools.pipelines.shared_weights import twin
from tokenmerge_tools.variants.variant import VARIANTS, Variant

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

# Enough steps for a dense one and one that merges, so that neither runs for the first time in a timed call.
# With fewer, cache-dit has no steps mask.
_WARM_UP_STEPS = 4

CONTINUES = "the finished pictures are safe; run the same command again to continue"


@dataclasses.dataclass(frozen=True)
class Task:
    """Pictures of one variant that are drawn together."""

    variant: Drawn
    items: tuple[Item, ...]


def missing(batches: Sequence[Sequence[Item]], variants: Sequence[Drawn], store: PictureStore) -> list[Task]:
    """List what is left to draw, batch by batch, so that an interrupted run leaves complete batches."""
    tasks = []
    for batch in batches:
        for variant in variants:
            left = tuple(item for item in batch if not store.picture(variant, item).exists())
            if left:
                tasks.append(Task(variant, left))
    return tasks


def draw(
    pipe: DiffusionPipeline,
    call: PipelineCall,
    tasks: Sequence[Task],
    store: PictureStore,
    on_pictures: Callable[[int], None],
) -> None:
    """Draw, time and write pictures. A picture appears on the disk only when it is complete.

    Before its first picture, a variant runs a few steps that are not timed. Variants get copies of the dense
    pipeline's denoiser with shared weights. ``call`` says how the pipeline is called, apart from prompts and
    seeds. ``on_pictures`` is called with the number of pictures that were just written.

    Raises:
        ConfigError: the memory or the disk is full. Finished pictures are kept.
    """
    with contextlib.ExitStack() as in_force:
        pipes: dict[Drawn, tuple[DiffusionPipeline, ToMeConfig | None]] = {}
        for task in tasks:
            own = _call_for(task, call)
            try:
                if task.variant not in pipes:
                    spec = task.variant.spec
                    config = spec.config(pipe)
                    pipes[task.variant] = applied(pipe, spec, config, in_force), config
                    _warm_up(own, pipes[task.variant][0])
                patched, config = pipes[task.variant]
                began = time.perf_counter()
                pictures = own(patched, lambda steps: None)
                seconds = (time.perf_counter() - began) / len(task.items)
            except Exception as error:
                if is_out_of_memory(error):
                    raise ConfigError(
                        f"batch: {len(task.items)} pictures at once do not fit into memory; lower --batch, "
                        "which changes pictures only by rounding; the finished ones are kept"
                    ) from error
                raise
            for item, picture in zip(task.items, pictures, strict=True):
                store.save(task.variant, item, picture, seconds, config, advice=CONTINUES)
            on_pictures(len(task.items))


def _call_for(task: Task, call: PipelineCall) -> PipelineCall:
    """The call that draws the pictures of a task."""
    prompts, seeds = [item.prompt.text for item in task.items], [item.seed for item in task.items]
    return call.of_pictures(prompts, seeds).with_steps(task.variant.steps)


def _warm_up(call: PipelineCall, pipe: DiffusionPipeline) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that so few steps save nothing
        steps = min(_WARM_UP_STEPS, call.arguments["num_inference_steps"])
        call.with_steps(steps)(pipe, lambda steps: None)


def applied(
    pipe: DiffusionPipeline, spec: Variant, config: ToMeConfig | None, in_force: contextlib.ExitStack
) -> DiffusionPipeline:
    """Copy a pipeline, and apply a variant with these settings to the copy until ``in_force`` is closed."""
    copied = twin(pipe)
    target = copied if VARIANTS[spec.name].of_pipeline else denoiser_of(copied)
    in_force.enter_context(spec.apply(target, config, None))
    return copied
