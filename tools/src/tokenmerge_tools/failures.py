"""Failures: recognises out-of-memory errors of other libraries, and turns other errors into one line."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch

from tokenmerge.errors import TokenMergingError, reason_of

_LONGEST = 500
_AGAIN = "to measure it again, delete its line from the results"
_WORDS = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device or the machine has no memory left.

    >>> is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried …"))
    True
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


@contextlib.contextmanager
def errors_as(error_of: Callable[[str], TokenMergingError]) -> Iterator[None]:
    """Turn any error of another library into one of this package.

    ``error_of`` makes the new error from the reason of the other one. Errors of this package and
    out-of-memory errors are not changed.
    """
    try:
        yield
    except TokenMergingError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise error_of(reason_of(error)) from error


@dataclasses.dataclass(frozen=True)
class Failure:
    """The reason why a cell has no measurements.

    ``status`` is one of :data:`tokenmerge_tools.records.kinds.STATUSES`, and ``message`` is one line.
    """

    status: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Classify an error: out of memory, not available here, or any other failure."""
        message = " ".join(str(error).split())[:_LONGEST]
        if is_out_of_memory(error):
            return cls("oom", f"{message or 'out of memory'}; {_AGAIN}")
        if isinstance(error, TokenMergingError):
            return cls("unavailable", message)
        return cls("error", f"{type(error).__name__}: {message}")
