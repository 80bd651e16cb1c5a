"""Token merging for array libraries other than PyTorch: partition, matching, plan, planners.

The counterpart of ``tokenmerge.ops`` and of three planners. It is written once, on the few operations of
``arrays.Arrays``, and needs only NumPy. Tests compare its plans with those of the PyTorch code on the same
arrays.
"""
