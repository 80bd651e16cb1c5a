"""What merging does at one size and number of steps: tokens, operations and cache, counted before a run.

Also what each step of a run did. May import ``runtime`` and everything below it. No model is timed here;
``slower_than_dense`` uses the timings that ``planners.calibration`` makes once for each device.
"""

from tokenmerge.report.cache_limit import bytes_of, within
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
from tokenmerge.report.summary import Conditions, summary
from tokenmerge.report.text_table import Tabled, TextTable

__all__ = [
    "Conditions",
    "Report",
    "Row",
    "RunSteps",
    "Tabled",
    "TextTable",
    "bytes_of",
    "check_merging",
    "counted_speedup",
    "gflops",
    "merges_tokens",
    "predict",
    "saved",
    "slower_than_dense",
    "summary",
    "within",
]
