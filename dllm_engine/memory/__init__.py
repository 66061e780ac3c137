"""Whether a model fits a machine, before it is loaded: what it needs, and what there is."""
