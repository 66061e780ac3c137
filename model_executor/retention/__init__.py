"""What to retain of a prompt or canvas: a scorer says which tokens matter to which head, a head budget how many each
head keeps. How many each layer keeps is known before anything runs: ``scheduler/methods/layer_budgets.py``."""
