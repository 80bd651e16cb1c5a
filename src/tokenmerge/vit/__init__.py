"""Token merging for vision transformers (D. Bolya et al., arXiv 2210.09461), from settings to report.

May import everything that stands above ``vit`` in the layering test; nothing of the diffusion side needs it.
"""
