"""Cost of a decision's probabilities beside its forward pass, and questions, asked alone
and together, beside generated JSON texts.

``python benchmarks/decisions.py [--model MODEL] [--output FILE.json]``
"""

import json
import re
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from program import Rows, argument_parser, report
from timing import timed, watched

NUM_REQUESTS = 16
NUM_FIELDS, NUM_CHOICES = 64, 16
TOGETHER = 3
"""Questions about a text."""


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    from dllm_engine import LLM
    from dllm_engine.model_executor.denoiser import Denoiser

    llm = LLM(options.model, max_model_len=2048)
    with watched(Denoiser, "forward") as passes:
        figures = field_figures(llm, passes)
        questions = question_figures(llm, passes)
    report(options, figures, questions=questions)


def field_figures(llm: Any, passes: list[float]) -> Rows:
    """Decisions of many fields. ``passes`` grows with each forward pass."""
    from dllm_engine.model_executor.constraints.running_decision import RunningDecision

    words = [first + second for first in "ABCDEFGHIJKLMNOP" for second in "0123456789"]
    equal, longer = {}, {}
    for i in range(NUM_FIELDS):
        values = [words[(7 * i + j) % len(words)] for j in range(NUM_CHOICES)]
        equal[f"f{i}"] = values
        longer[f"f{i}"] = [value + "x" * (j % 2) for j, value in enumerate(values)]
    prompts = [f"Number {number}." for number in range(NUM_REQUESTS)]
    figures: Rows = []
    for texts, fields in (("equal lengths", equal), ("two lengths", longer)):
        llm.decide(prompts[:2], fields)  # warms up
        passes.clear()
        with watched(RunningDecision, "commit") as commits:
            for prompt in prompts:
                llm.decide([prompt], fields)
        one_pass, own = statistics.median(passes), statistics.median(commits)
        figures.append(
            {
                "texts": texts,
                "pass ms": 1e3 * one_pass,
                "probabilities ms": 1e3 * own,
                "share": own / one_pass,
            }
        )
    return figures


def question_figures(llm: Any, passes: list[float]) -> Rows:
    """Where people live, several of them in each text, one text at a time."""
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
        for example in make_examples(
            "facts", NUM_REQUESTS, 0, pairs=(8, 8), asked=TOGETHER
        )
    ]
    figures: Rows = []
    for way, answers in ways.items():
        answers(*asked[0])  # warms up
        passes.clear()
        measured = [timed(partial(answers, *each)) for each in asked]
        right = [each for answered, _ in measured for each in answered]
        figures.append(
            {
                "way": way,
                "passes": len(passes) / NUM_REQUESTS,
                "ms": 1e3 * statistics.median(seconds for _, seconds in measured),
                "right": statistics.mean(right),
            }
        )
    return figures


if __name__ == "__main__":
    main()
