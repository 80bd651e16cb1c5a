"""Recognises out-of-memory errors of other libraries, and turns their other errors into one line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from tokenmerge.errors import TokenMergingError, reason_of

_WORDS = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the machine has no memory left.

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
