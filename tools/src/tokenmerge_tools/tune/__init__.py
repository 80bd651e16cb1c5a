"""``tokenmerge tune``: finds the closest settings at a wanted speed, or the fastest at a wanted closeness.

Measurements are made in rounds. In a round, dense and some settings draw one prompt from one seed, one after
the other, and each call is timed. :mod:`~tokenmerge_tools.tune.search` chooses the next round, and
:mod:`~tokenmerge_tools.tune.decision` the settings that are the result. Both are pure functions of the
measurements so far, so a run that was killed continues where it stopped.

Optuna 5.0 was considered and is not used. Its pruners and ``trial.report`` refuse studies with two
objectives. Its trials run one after the other, but settings are only comparable here if their calls are
interleaved. Its samplers need more trials than fit into ten minutes, in which about a hundred pictures are
drawn. The results file of ``tokenmerge bench`` already survives a kill, and needs no SQLAlchemy.
"""
