"""One process, or one of several that ``accelerate launch`` started on one or more machines."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch

from tokenmerge.errors import ConfigError
from tokenmerge_tools.pipelines.settings import resolve_device

T = TypeVar("T")

# Environment variables with the number of processes: torchrun's (used by accelerate launch), and MPI's.
_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")

# The first process to finish waits for the last one, which may have hours of pictures left.
_PATIENCE = datetime.timedelta(days=30)


@dataclasses.dataclass(frozen=True)
class Processes:
    """This process among all processes."""

    index: int
    count: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes records and messages."""
        return self.index == 0

    def share(self, everything: Sequence[T]) -> Sequence[T]:
        """Return this process's share: every ``count``-th element, so that all end at about the same time."""
        return everything[self.index :: self.count]

    def gather(self, mine: T) -> list[T]:
        """Collect one value from each process, in the order of their indices. Waits for all processes."""
        if self.count == 1:
            return [mine]
        from accelerate.utils import gather_object

        gathered: list[T] = gather_object([mine])
        return gathered


@contextlib.contextmanager
def processes(device: str) -> Iterator[Processes]:
    """Find the number of processes, and connect them.

    With several processes, the device ``"auto"`` gives each its own GPU.
    """
    if all(os.environ.get(name, "1") == "1" for name in _WORLD_SIZES):
        yield Processes(0, 1, resolve_device(device))
        return
    if device not in ("auto", "cpu"):
        raise ConfigError(
            f"device: expected auto or cpu, since each process has its own device, got {device!r}"
        )
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    cpu = resolve_device(device).type == "cpu" or parse_flag_from_env("ACCELERATE_USE_CPU")
    state: Any = PartialState(cpu=cpu, timeout=_PATIENCE)
    try:
        yield Processes(state.process_index, state.num_processes, state.device)
    finally:
        state.destroy_process_group()
