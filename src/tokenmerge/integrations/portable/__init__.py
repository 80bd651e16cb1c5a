"""Token merging for array libraries other than PyTorch: partition, matching, plan, planners.

The counterpart of ``tokenmerge.ops`` and of three planners. It is written once, for the few operations of
``arrays.Arrays``, and needs NumPy alone. Tests compare its plans with those of the PyTorch code on the same
arrays.
"""
