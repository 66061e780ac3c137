"""Cost of a decision's probabilities beside its forward pass, and questions, asked alone
and together, beside generated JSON texts.

``python benchmarks/decisions.py [--model MODEL] [--fields N] [--choices N] [--requests
N] [--questions N] [--output FILE.json]``
"""

import json
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from program import Rows, argument_parser, report


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--model", default="demo")
    counts = (("fields", 64), ("choices", 16), ("requests", 16), ("questions", 3))
    for name, count in counts:
        parser.add_argument(f"--{name}", type=int, default=count)
    options = parser.parse_args()
    from dllm_engine import LLM
    from dllm_engine.model_executor.constraints.running_decision import RunningDecision
    from dllm_engine.model_executor.denoiser import Denoiser

    llm = LLM(options.model, max_model_len=2048)
    words = [first + second for first in "ABCDEFGHIJKLMNOP" for second in "0123456789"]
    alike = {
        f"f{i}": [words[(7 * i + j) % len(words)] for j in range(options.choices)]
        for i in range(options.fields)
    }
    longer = {
        name: [value + "x" * (i % 2) for i, value in enumerate(values)]
        for name, values in alike.items()
    }
    prompts = [f"Number {number}." for number in range(options.requests)]
    figures = []
    passes: list[float] = []
    marginals: list[float] = []
    with (
        mock.patch.object(Denoiser, "forward", timed(Denoiser.forward, passes)),
        mock.patch.object(
            RunningDecision, "commit", timed(RunningDecision.commit, marginals)
        ),
    ):
        for texts, fields in (("equal lengths", alike), ("two lengths", longer)):
            llm.decide(prompts[:2], fields)
            passes.clear()
            marginals.clear()
            for prompt in prompts:
                llm.decide([prompt], fields)
            one_pass, own = (
                1e3 * statistics.median(seconds) for seconds in (passes, marginals)
            )
            figures.append(
                {
                    "texts": texts,
                    "pass ms": one_pass,
                    "probabilities ms": own,
                    "share": own / one_pass,
                }
            )
        questions = question_figures(llm, options.requests, options.questions, passes)
    report(options, figures, questions=questions)


def timed(original: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The function, which also appends the seconds that it took."""
    import torch

    def run(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = original(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        return result

    return run


def question_figures(llm: Any, count: int, together: int, passes: list[float]) -> Rows:
    """Where people live, ``together`` of them in each of ``count`` texts, one text at a
    time. ``passes`` grows with each forward pass.
    """
    from vllm.sampling_params import StructuredOutputsParams

    from dllm_engine import DiffusionParams, Questions
    from dllm_engine.decisions.requests import schema_of
    from dllm_engine.demo.tasks import CITIES, make_examples

    choices = [{"value": city} for city in CITIES]

    def decided(prompt: str, homes: dict[str, str], joint: bool) -> list[bool]:
        text = prompt.rpartition(" Where ")[0]
        questions = [
            {
                "type": "choice",
                "instructions": f"Where does {name} live?",
                "choices": choices,
            }
            for name in homes
        ]
        (answers,) = llm.decide(text, Questions(questions, joint))
        pairs = zip(answers, homes.values(), strict=True)
        return [answer.value == home for answer, home in pairs]

    def generated(prompt: str, homes: dict[str, str], **rule: Any) -> list[bool]:
        schema = schema_of({name: list(CITIES) for name in homes})
        constraint = StructuredOutputsParams(json=schema)
        params = DiffusionParams(gen_length=64, structured_outputs=constraint, **rule)
        chat = [{"role": "user", "content": prompt}]
        (output,) = llm.chat(chat, params, use_tqdm=False)
        values = json.loads(output.outputs[0].text)
        return [values[name] == home for name, home in homes.items()]

    ways: dict[str, Callable[..., list[bool]]] = {
        "each question alone": partial(decided, joint=False),
        "joint": partial(decided, joint=True),
        "JSON, threshold=0.9": partial(generated, threshold=0.9),
        "JSON, one token a step": generated,
    }
    asked = [
        (example.prompt, dict(re.findall(r"(\w+) lives in (\w+)", example.answer)))
        for example in make_examples("facts", count, 0, pairs=(8, 8), asked=together)
    ]
    figures: Rows = []
    for way, answers in ways.items():
        answers(*asked[0])
        passes.clear()
        seconds, right = [], []
        for prompt, homes in asked:
            begin = time.perf_counter()
            right += answers(prompt, homes)
            seconds.append(time.perf_counter() - begin)
        figures.append(
            {
                "way": way,
                "passes": len(passes) / count,
                "ms": 1e3 * statistics.median(seconds),
                "right": statistics.mean(right),
            }
        )
    return figures


if __name__ == "__main__":
    main()
