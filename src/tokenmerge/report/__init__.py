"""What merging does at one size and number of steps: tokens, operations and cache, counted before a run.

May import ``runtime`` and everything below it; measures nothing.
"""

from tokenmerge.report.cache_limit import bytes_of, within
from tokenmerge.report.prediction import Report, Row, aligned, counted_speedup, predict, saved
from tokenmerge.report.summary import Conditions, summary

__all__ = [
    "Conditions",
    "Report",
    "Row",
    "aligned",
    "bytes_of",
    "counted_speedup",
    "predict",
    "saved",
    "summary",
    "within",
]
