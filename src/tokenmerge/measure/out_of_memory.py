"""Telling a lack of memory from other failures."""

from __future__ import annotations

import torch

_WORDS = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the machine has no memory left.

    >>> is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried …"))
    True
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)
