"""What merging does at one size and number of steps: tokens, operations and cache, counted before a run.

Also what each step of a run did. May import ``runtime`` and everything below it. No model is timed here;
``slower_than_dense`` uses the timings that ``planners.calibration`` makes once for each device.
"""

from tokenmerge.report.cache_limit import Change, bytes_of, change_within, in_words
from tokenmerge.report.prediction import (
    Report,
    Row,
    check_merging,
    counted_speedup,
    gflops,
    merges_tokens,
    predict,
    saved,
    slower_than_dense,
)
from tokenmerge.report.run_steps import RunSteps
from tokenmerge.report.summary import Conditions, summary, title
from tokenmerge.report.text_table import Tabled, TextTable

__all__ = [
    "Change",
    "Conditions",
    "Report",
    "Row",
    "RunSteps",
    "Tabled",
    "TextTable",
    "bytes_of",
    "change_within",
    "check_merging",
    "counted_speedup",
    "gflops",
    "in_words",
    "merges_tokens",
    "predict",
    "saved",
    "slower_than_dense",
    "summary",
    "title",
]
