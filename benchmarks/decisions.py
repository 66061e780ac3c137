"""Cost of a decision's probabilities beside its forward pass, and decisions per second
beside generated JSON texts.

``python benchmarks/decisions.py [--model MODEL] [--fields N] [--choices N] [--requests
N] [--output FILE.json]``
"""

import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from program import argument_parser, report

TURNS = 3


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--model", default="demo")
    for name, count in (("fields", 64), ("choices", 16), ("requests", 16)):
        parser.add_argument(f"--{name}", type=int, default=count)
    options = parser.parse_args()
    import torch
    from vllm.sampling_params import StructuredOutputsParams

    from dllm_engine import LLM, DiffusionParams
    from dllm_engine.decisions.requests import schema_of
    from dllm_engine.model_executor.constraints.running_decision import RunningDecision
    from dllm_engine.model_executor.denoiser import Denoiser

    def timed(original: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = original(*args, **kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
            return result

        return run

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
    for texts, fields in (("equal lengths", alike), ("two lengths", longer)):
        llm.decide(prompts[:2], fields)
        passes: list[float] = []
        marginals: list[float] = []
        with (
            mock.patch.object(Denoiser, "forward", timed(Denoiser.forward, passes)),
            mock.patch.object(
                RunningDecision, "commit", timed(RunningDecision.commit, marginals)
            ),
        ):
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

    few = dict([*alike.items()][:3])
    json_text = StructuredOutputsParams(json=schema_of(few))
    params = DiffusionParams(gen_length=64, threshold=0.9, structured_outputs=json_text)
    ways: dict[str, Callable[[], Any]] = {
        "decisions": lambda: llm.decide(prompts, few),
        "JSON, threshold=0.9": lambda: llm.generate(prompts, params, use_tqdm=False),
    }
    rates: dict[str, float] = dict.fromkeys(ways, 0.0)
    for _ in range(TURNS):
        for name, run in ways.items():
            begin = time.perf_counter()
            run()
            rates[name] = max(
                rates[name], options.requests / (time.perf_counter() - begin)
            )
    report(options, figures, requests_per_second=rates)


if __name__ == "__main__":
    main()
