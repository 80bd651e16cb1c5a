"""``tokenmerge tune``: finds a closer generation plan than the rule's at the same speed, on one's own model.

It begins with the plan of the default method. :mod:`~tokenmerge_tools.tune.search` compares its neighbours,
which :mod:`~tokenmerge_tools.tune.plans` makes at no lower counted speed, by the error of the final latents.
The best plan and the rule's then draw prompts that were kept back, in timed calls beside dense and fewer
steps. The search is a pure function of the measurements, so a run that was killed continues where
it stopped.
"""
