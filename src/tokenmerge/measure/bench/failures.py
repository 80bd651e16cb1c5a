"""What went wrong with a cell, as a status and a sentence for its record."""

from __future__ import annotations

import dataclasses

import torch

from tokenmerge.errors import TokenMergingError

__all__ = ["Failure", "is_out_of_memory"]

_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")
_LONGEST = 500
_AGAIN = "to measure it again, delete its line from the results"


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a cell has no figures.

    Args:
        status: of :data:`tokenmerge.measure.bench.records.STATUSES`.
        message: in words, on one line.
    """

    status: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Tell apart what does not fit, what cannot run here, and what failed."""
        message = " ".join(str(error).split())[:_LONGEST]
        if is_out_of_memory(error):
            return cls("oom", f"{message or 'out of memory'}; {_AGAIN}")
        if isinstance(error, TokenMergingError):
            return cls("unavailable", message)
        return cls("error", f"{type(error).__name__}: {message}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine had no memory left.

    >>> is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried …"))
    True
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
