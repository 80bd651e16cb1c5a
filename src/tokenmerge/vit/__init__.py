"""Token merging for vision transformers (D. Bolya et al., arXiv 2210.09461), from settings to report."""
