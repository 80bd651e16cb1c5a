"""Token merging for vision transformers (D. Bolya et al., arXiv 2210.09461), from settings to report.

May import what its line in ``tests/test_layering.py`` lists. The code for diffusion models does not need it.
"""
