"""The demo models' answers under every cache method, against those stored from a CPU."""

import gc
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dllm_engine.check.checks import Check, cannot_run
from dllm_engine.demo import DEMO_BLOCKS, DEMO_MODEL
from dllm_engine.params import DiffusionParams
from dllm_engine.scheduler.methods import CACHE_METHODS, methods_for

if TYPE_CHECKING:
    from vllm import RequestOutput

    from dllm_engine.llm import LLM

ANSWERS = Path(__file__).parent / "answers.json"
"""The answers of each cache method. ``python -m tests.cli.test_check`` writes them anew."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_seqs": 2,
    "kv_cache_memory_bytes": 64 << 20,
    "use_tqdm_on_load": False,
    "gpu_memory_utilization": 0.05,  # the pool's size is given; this only says how much must be free
}
_METHODS = json.loads((Path(__file__).parent / "methods.json").read_text(encoding="utf-8"))
CACHE_OPTIONS: dict[str, dict[str, Any]] = _METHODS["cache_options"]
"""With the defaults, prompts as short as these would neither be refreshed nor evicted."""
LOGPROB_BOUND = 1e-3
SHARDED_METHOD: str = _METHODS["two_ranks"]
"""What it retains follows from sums over the ranks."""
METHODS = list(CACHE_METHODS)
FIRST_WORD, VOCAB_SIZE = 4, 512
"""Of both demo models; token ids below the first are special."""


def answer_checks(device: torch.device) -> Iterator[Check]:
    """Each cache method; recorded steps where a method's can be recorded; two ranks."""
    several = device.type == "cuda" and torch.cuda.device_count() > 1
    for method in METHODS:
        yield Check("answers", method, partial(_compare, method))
    for method in METHODS:
        if CACHE_METHODS[method].recordable:
            yield Check("answers, recorded steps", method, partial(_compare, method, cuda_graphs=True))
    on_two = partial(_compare, SHARDED_METHOD, tensor_parallel_size=2)
    yield Check("answers, two ranks", SHARDED_METHOD, on_two if several else partial(cannot_run, "there is one device"))


def _compare(method: str, cuda_graphs: bool = False, **settings: Any) -> tuple[float, float]:
    """The largest difference of a token's log-probability; all tokens must be those that are stored."""
    stored = json.loads(ANSWERS.read_text(encoding="utf-8"))[method]
    with running(method, cuda_graphs=cuda_graphs, **settings) as llm:
        if cuda_graphs and not all(llm.collective_rpc("records_steps")):
            raise ValueError("steps could not be recorded; the engine's log says why")
        # Only what fills in tokens alone is recorded.
        answers, tokens = answers_of(llm), [output.outputs[0].token_ids for output in _generate(llm, logprobs=None)]
    error = 0.0
    for answer, again, expected in zip(answers, tokens, stored, strict=True):
        for found in (answer["tokens"], list(again)):
            if found != expected["tokens"]:
                raise ValueError(f"the answer's tokens are {found}, not {expected['tokens']}")
        differences = torch.tensor(answer["logprobs"]) - torch.tensor(expected["logprobs"])
        error = max(error, float(differences.abs().max()))
    return error, LOGPROB_BOUND


def demo_for(method: str) -> str:
    """The demo model that a cache method is for."""
    return DEMO_MODEL if method in methods_for("full") else DEMO_BLOCKS


@contextmanager
def running(method: str, **settings: Any) -> Iterator["LLM"]:
    """An engine of a method's demo model, ended before the next one starts: a device holds one at a time."""
    from dllm_engine.llm import LLM

    options = CACHE_OPTIONS.get(method)
    llm = LLM(demo_for(method), cache_method=method, cache_options=options, **SETTINGS | settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        torch.cuda.empty_cache()  # vLLM measures what the device has free; without a GPU this does nothing


def answers_of(llm: "LLM") -> list[dict[str, Any]]:
    """Tokens of two responses of one batch, and their log-probabilities when they were unmasked.

    Prompts are random tokens, one answered greedily and one by sampling. Asked what it was trained on, the model is so
    sure that it answers right even with a cache that is wrong.
    """
    completions = [output.outputs[0] for output in _generate(llm, logprobs=0)]
    return [
        {
            "tokens": list(each.token_ids),
            "logprobs": [
                round(of_position[token].logprob, 6)
                for token, of_position in zip(each.token_ids, each.logprobs, strict=True)
            ],
        }
        for each in completions
    ]


def _generate(llm: "LLM", logprobs: int | None) -> "list[RequestOutput]":
    same: dict[str, Any] = {"gen_length": 24, "block_length": 8, "ignore_eos": True, "logprobs": logprobs}
    params = [DiffusionParams(**same), DiffusionParams(temperature=0.7, seed=1, **same)]
    prompts = [_random_tokens(50, seed=2), _random_tokens(20, seed=0)]
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def _random_tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(FIRST_WORD, VOCAB_SIZE) for _ in range(count)]
