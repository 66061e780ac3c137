"""Two tensor-parallel ranks unmask what one does where a guide decides."""

import pytest
from transformers import AutoTokenizer

from dllm_engine import DiffusionParams
from dllm_engine.demo import DEMO_GUIDE_DIR, DEMO_MODEL_DIR
from dllm_engine.demo.tasks import TASKS, make_examples
from tests.support.byte_level_tokenizers import copy_renumbered
from tests.support.engines import generate
from tests.support.sharded import assert_alike, run_and_abort, two_ranks, watch_pages

pytestmark = pytest.mark.slow

ASKED = [{}, {"guided": False, "threshold": 0.9}, {"guide_threshold": 0.8, "speculation_length": 5}]
ASKED += [{"guide_top_k": 3, "guide_correction": True}, {"guide_fallback": "draft"}, {"guided": False}]


@pytest.mark.parametrize(("cache_method", "other_tokenizer"), [("freecache", False), ("dllm_cache", True)])
def test_two_ranks_follow_the_guide_as_one_does(engines, tmp_path, cache_method, other_tokenizer):
    guide = DEMO_GUIDE_DIR
    if other_tokenizer:
        guide = tmp_path / "guide"
        copy_renumbered(DEMO_GUIDE_DIR, guide)
    engine = {"cache_method": cache_method, "guide_model": str(guide), "page_size": 16}
    engine["skip_tokenizer_init"] = not other_tokenizer
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    texts = [f"User: {example.prompt}\nBot:" for task in TASKS for example in make_examples(task, 2, seed=5)]
    prompts = [tokenizer.encode(text) for text in texts]
    asked = [{"gen_length": 32, "block_length": 8} | ASKED[i % len(ASKED)] for i in range(len(prompts))]
    params = [DiffusionParams(**of_one) for of_one in asked]
    with two_ranks(DEMO_MODEL_DIR, **engine) as sharded:
        pages = watch_pages(sharded)
        run_and_abort(sharded, prompts[:4], params[:4])
        answers = generate(sharded, prompts, params)

    alone = generate(engines(DEMO_MODEL_DIR, max_model_len=512, **engine), prompts, params)
    # A trained model is equally sure of many end tokens: without a guide, which comes first is a matter of rounding.
    for guided, figure in ((True, "unmasked_per_step"), (False, "forward_passes")):
        chosen = [i for i, of_one in enumerate(asked) if of_one.get("guided", True) == guided]
        assert_alike([answers[i] for i in chosen], [alone[i] for i in chosen], figure)
    assert all(allocated <= reserved <= planned for planned, allocated, reserved in pages)
    assert pages[-1][1:] == (0, 0)
