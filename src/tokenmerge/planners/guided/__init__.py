"""Planners that also look at how much guidance changed each token in the last denoising step.

They take ``importance`` ``[b, n]`` as their last argument. In steps where it is unknown, ``tome`` plans.
"""
