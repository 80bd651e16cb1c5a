"""Token merging for vision transformers (D. Bolya et al., arXiv 2210.09461)."""
