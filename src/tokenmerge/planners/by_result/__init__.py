"""Planners that also look at the model's result of the last denoising step.

They take ``scores`` ``[b, n]`` as their last argument, one for each token. In steps without known scores,
``tome`` plans.
"""
