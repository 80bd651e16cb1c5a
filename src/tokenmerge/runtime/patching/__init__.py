"""What changes a model: patching, restoring, and the hooks before and after its calls.

``patch`` patches and restores whole models with ``select`` and ``swap``; only ``swap`` changes classes.
"""
