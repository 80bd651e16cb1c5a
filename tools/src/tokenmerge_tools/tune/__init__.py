"""``tokenmerge tune``: finds the right speed for one's own model, and how far the estimates are off there.

It draws a few prompts dense, and then with the default method at a few speeds, which
:mod:`~tokenmerge_tools.tune.speeds` chooses by bisection. Each speed is drawn beside fewer steps of the same
time. Every image has a record, and the result follows from the records alone, so a run that was killed
continues where it stopped.
"""
