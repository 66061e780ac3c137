"""Training of the two demo models that ship with the package: a masked diffusion model and its guide.

    python -m scripts.train_demo model --out DIR
    python -m scripts.train_demo guide --out DIR

Run them in the checkout, in the environment that `scripts/dev.py` makes. Each writes a checkpoint folder. Seeds are
fixed and one CPU thread computes, so the same machine with the same library versions gives the same bytes again.
"""
