"""Pure functions on tokens ``[b, n, c]``. They know neither models nor settings.

``partition`` says which tokens are destinations, for all images or for each. ``matching`` and ``tiles`` match
the others to them. ``plan`` and ``soft`` turn the result into a plan, which merges and unmerges tokens.
"""
