"""Counts tokens, operations and cache before a run, and shows what each step of a run did.

No model is timed here; ``hardly_faster`` uses the timings of ``tokenmerge.calibration``.
"""

from tokenmerge.report.prediction import Report, check_merging, predict, saved
from tokenmerge.report.summary import RunSteps, in_words
from tokenmerge.runtime.memory.run_log import StepRow
from tokenmerge.runtime.steps.pipeline import latent_scale

__all__ = ["Report", "RunSteps", "StepRow", "check_merging", "in_words", "latent_scale", "predict", "saved"]
