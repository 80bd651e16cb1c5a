"""Counts tokens, operations and cache before a run, and shows what each step of a run did.

No model is timed here; ``hardly_faster`` uses the timings of ``planners.calibration``.
"""

from tokenmerge.report.cache_limit import Change, bytes_of, change_within, in_words
from tokenmerge.report.prediction import (
    Report,
    check_merging,
    counted_speedup,
    gflops,
    hardly_faster,
    predict,
    saved,
)
from tokenmerge.report.summary import Conditions, RunSteps, summary, title
from tokenmerge.text_table import Row

__all__ = [
    "Change",
    "Conditions",
    "Report",
    "Row",
    "RunSteps",
    "bytes_of",
    "change_within",
    "check_merging",
    "counted_speedup",
    "gflops",
    "hardly_faster",
    "in_words",
    "predict",
    "saved",
    "summary",
    "title",
]
