"""Training of the models that ship with the package: two diffusion models and a guide.

    python -m scripts.train_demo model --out DIR
    python -m scripts.train_demo blocks --out DIR
    python -m scripts.train_demo guide --out DIR

Run them in the checkout, in the environment that `scripts/dev.py` makes. Each writes a
checkpoint folder: weights and the demo model's tokenizer are trained, the other files
are copied from the package. Seeds are fixed and one CPU thread computes, so the same
machine with the same library versions gives the same bytes again. `dllm eval --model
DIR` measures the result.
"""
