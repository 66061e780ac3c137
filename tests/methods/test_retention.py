"""What ``sparse`` and ``maskkv`` retain at random. ``test_random_requests.py`` compares the other scorers with plain
ones."""

import pytest

from tests.support.answers import answers

PROMPT = [7 * i % 100 for i in range(37)]
EVEN = {"kv_budget": 12, "layer_budget": "uniform", "head_budget": "uniform"}


@pytest.mark.parametrize(("method", "options"), [("sparse", {"retention_ratio": 0.4}), ("maskkv", EVEN)])
def test_random_retention_follows_the_seed(engines, reference_checkpoints, method, options):
    settings = {"page_size": 8, "max_model_len": 128, "cache_method": method}
    options = options | {"scorer": "random"}
    llm = engines.shared(reference_checkpoints / "llada-tiny-a", cache_options=options, **settings)
    requests = [(PROMPT, {"gen_length": 24, "block_length": 8, "seed": seed}) for seed in (1, 1, 2)]
    name = "retained_positions" if method == "sparse" else "retained_per_head"
    first, again, other = (answer.traces[name] for answer in answers(llm, requests))
    assert first == again != other
    if method == "maskkv":
        flat = [tuple(positions) for layer in first[0] for positions in layer]
        assert len(set(flat)) == len(flat), "layers and heads draw their own"
