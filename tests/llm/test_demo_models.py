"""The shipped models beside the demo model: a guide, which loads without this package,
and one of block diffusion.
"""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dllm_engine.demo import DEMO_BLOCKS, DEMO_GUIDE_DIR
from dllm_engine.demo.tasks import TASKS, make_examples
from scripts.train_demo.recipes import RECIPES
from tests.support.engines import demo_answers

MAX_BYTES = 4 * 1024 * 1024
RESPONSE_TOKENS = 32
SEED = 100
"""Far below the training seeds; the figures in the model card and in docs/evaluation.md
come from other ones.
"""


@pytest.fixture(scope="module")
def guide():
    model, report = AutoModelForCausalLM.from_pretrained(
        DEMO_GUIDE_DIR, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), (
        "no tensor is missing, left over or of another shape"
    )
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_GUIDE_DIR)


def canvas(tokenizer, example) -> tuple[list[int], int, int]:
    """Prompt, answer and end-of-text as the demo model's requests have them; where the
    answer starts and ends.
    """
    message = {"role": "user", "content": example.prompt}
    prompt = tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, tokenize=False
    )
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    answer_ids = tokenizer.encode(" " + example.answer, add_special_tokens=False)
    tail = [tokenizer.eos_token_id] * (RESPONSE_TOKENS - len(answer_ids))
    return (
        prompt_ids + answer_ids + tail,
        len(prompt_ids),
        len(prompt_ids) + len(answer_ids) + 1,
    )


@pytest.mark.parametrize("task", TASKS)
@torch.inference_mode()
def test_it_foresees_right_answers_and_their_end(guide, tokenizer, task):
    right = total = tail_right = tail_total = 0
    for example in make_examples(task, 20, SEED):
        tokens, start, end = canvas(tokenizer, example)
        # Of every token but the first, given the true ones before it.
        hits = guide(torch.tensor([tokens])).logits[0, :-1].argmax(
            dim=-1
        ) == torch.tensor(tokens[1:])
        answer = hits[start - 1 : end - 1]
        tail = hits[end - 1 :]
        right = right + int(answer.sum())
        total = total + len(answer)
        tail_right = tail_right + int(tail.sum())
        tail_total = tail_total + len(tail)
    assert right / total > 0.95
    assert tail_right / tail_total > 0.95


# ``demo-blocks``: a trained model whose attention goes by blocks, and the training that
# makes it


@pytest.mark.parametrize("threshold", [None, 0.9])
def test_it_answers_right_and_its_cache_changes_no_token_and_a_threshold_takes_fewer_passes(
    engines, threshold
):
    examples = [example for task in TASKS for example in make_examples(task, 4, SEED)]
    answers = partial(demo_answers, engines, examples, DEMO_BLOCKS, dtype="float32")
    cached, plain = (
        answers(threshold, cache_method=method) for method in ("block", "none")
    )
    assert [list(each.token_ids) for each in cached] == [
        list(each.token_ids) for each in plain
    ]
    right = sum(
        each.text.strip() == example.answer
        for each, example in zip(cached, examples, strict=True)
    )
    assert right >= 0.9 * len(examples)
    assert {each.finish_reason for each in cached} == {"stop"}, (
        "an end token ends every answer"
    )
    if threshold:
        single = answers(cache_method="block")
        assert sum(c.diffusion.forward_passes for c in cached) < sum(
            s.diffusion.forward_passes for s in single
        )


@pytest.mark.parametrize("which", ["model", "blocks"])
def test_training_runs_and_writes_the_tensors(which, tmp_path):
    recipe = RECIPES[which].with_steps(2)
    assert sum(file.stat().st_size for file in recipe.shipped.iterdir()) <= MAX_BYTES
    recipe.run(tmp_path)
    files = {file.name for file in recipe.shipped.iterdir()} - {
        "README.md",
        "decision_template.jinja",
    }
    assert {file.name for file in tmp_path.iterdir()} == files
    trained, shipped = (
        load_file(folder / "model.safetensors") for folder in (tmp_path, recipe.shipped)
    )
    shapes = [
        {name: (t.shape, t.dtype) for name, t in tensors.items()}
        for tensors in (trained, shipped)
    ]
    assert shapes[0] == shapes[1]
    assert any(
        not torch.equal(tensor, shipped[name]) for name, tensor in trained.items()
    )
