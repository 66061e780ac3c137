"""The shipped guide: a causal language model that loads without this package and knows the demo model's tasks."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dllm_engine.demo import DEMO_GUIDE_DIR, DEMO_MODEL_DIR
from dllm_engine.demo.tasks import TASKS, make_examples

MAX_BYTES = 4 * 1024 * 1024
RESPONSE_TOKENS = 32
SEED = 100
"""Far below the training seeds; the figures of the model card come from seed 0."""


@pytest.fixture(scope="module")
def guide():
    model, report = AutoModelForCausalLM.from_pretrained(DEMO_GUIDE_DIR, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), "no tensor is missing, left over or of another shape"
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO_GUIDE_DIR)


def canvas(tokenizer, example) -> tuple[list[int], int, int]:
    """Prompt, answer and end-of-text as the demo model's requests have them; where the answer starts and ends."""
    message = {"role": "user", "content": example.prompt}
    prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    answer_ids = tokenizer.encode(" " + example.answer, add_special_tokens=False)
    tail = [tokenizer.eos_token_id] * (RESPONSE_TOKENS - len(answer_ids))
    return prompt_ids + answer_ids + tail, len(prompt_ids), len(prompt_ids) + len(answer_ids) + 1


def test_it_is_a_small_plain_llama(guide):
    assert type(guide).__name__ == "LlamaForCausalLM"
    assert sum(file.stat().st_size for file in DEMO_GUIDE_DIR.iterdir()) <= MAX_BYTES
    config = json.loads((DEMO_GUIDE_DIR / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert not [name for name, _ in guide.named_parameters() if name.endswith("bias")]


def test_it_shares_the_demo_models_tokens(guide, tokenizer):
    demo_tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    demo_config = json.loads((DEMO_MODEL_DIR / "config.json").read_text(encoding="utf-8"))
    assert tokenizer.get_vocab() == demo_tokenizer.get_vocab()
    assert tokenizer.chat_template == demo_tokenizer.chat_template
    for name in ("vocab_size", "eos_token_id", "pad_token_id", "bos_token_id"):
        assert getattr(guide.config, name) == demo_config[name]
    for task in TASKS:
        (example,) = make_examples(task, 1, SEED)
        assert canvas(tokenizer, example) == canvas(demo_tokenizer, example)


@pytest.mark.parametrize("task", TASKS)
@torch.inference_mode()
def test_it_foresees_right_answers_and_their_end(guide, tokenizer, task):
    right = total = tail_right = tail_total = 0
    for example in make_examples(task, 20, SEED):
        tokens, start, end = canvas(tokenizer, example)
        # Of every token but the first, given the true ones before it.
        hits = guide(torch.tensor([tokens])).logits[0, :-1].argmax(dim=-1) == torch.tensor(tokens[1:])
        answer, tail = hits[start - 1 : end - 1], hits[end - 1 :]
        right, total = right + int(answer.sum()), total + len(answer)
        tail_right, tail_total = tail_right + int(tail.sum()), tail_total + len(tail)
    assert right / total > 0.95
    assert tail_right / tail_total > 0.95
