"""Token merging for vision transformers (D. Bolya et al., arXiv 2210.09461), from settings to report.

``tests/test_layering.py`` lists what this package may import. The code for diffusion models does not need it.
"""
