"""Token merging for array libraries other than PyTorch: the counterpart of ``tokenmerge.ops``.

It needs only NumPy. Tests compare its plans with those of the PyTorch code on the same arrays.
"""
