"""Counts tokens, operations and cache before a run, and shows what each step of a run did.

No model is timed here; ``slower_than_dense`` uses the timings of ``planners.calibration``.
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
