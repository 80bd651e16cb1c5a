"""The failure of a cell, as a status and a message for its record."""

from __future__ import annotations

import dataclasses

from tokenmerge.errors import TokenMergingError
from tokenmerge_tools.failures import is_out_of_memory

_LONGEST = 500
_AGAIN = "to measure it again, delete its line from the results"


@dataclasses.dataclass(frozen=True)
class Failure:
    """The reason why a cell has no measurements.

    ``status`` is one of :data:`tokenmerge_tools.records.kinds.STATUSES`, and ``message`` is one line of
    text.
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
