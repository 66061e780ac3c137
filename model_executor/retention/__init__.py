"""What to retain of a prompt or canvas: a scorer says which tokens matter to which head, a head budget how many each
head keeps. How many each layer keeps: ``scheduler/methods/layer_budgets.py``, by ``layer_importance.py``."""
