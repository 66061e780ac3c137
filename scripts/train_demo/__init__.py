"""Training of the models that ship with the package: two diffusion models and a guide.

    python -m scripts.train_demo model --out DIR
    python -m scripts.train_demo blocks --out DIR
    python -m scripts.train_demo guide --out DIR

Run them in the checkout, in the environment that `scripts/dev.py` makes. Each writes a checkpoint folder. Seeds are
fixed and one CPU thread computes, so the same machine with the same library versions gives the same bytes again.
"""
