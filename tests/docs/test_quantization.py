"""The table in ``docs/quantization.md`` is what ``dllm plan`` computes.

To write it anew: ``python -m tests.docs.test_quantization``
"""

from pathlib import Path

from dllm_engine.memory.capacity import GIB, Deployment, SizingError, plan
from dllm_engine.options import EngineOptions

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quantization.md"
BEGIN, END = "<!-- the table, by python -m tests.docs.test_quantization -->\n", "\n"
MODELS = {
    "LLaDA-8B": "GSAI-ML/LLaDA-8B-Instruct",
    "Dream-7B": "Dream-org/Dream-v0-Instruct-7B",
    "LLaDA-MoE": "inclusionAI/LLaDA-MoE-7B-A1B-Instruct",
}
WEIGHTS = {"bfloat16": None, "INT8, FP8": "int8", "INT4": "int4"}
LENGTHS = [(256, 256), (1024, 256), (3584, 512)]
SIZES = [8, 12, 16, 24]


def written() -> str:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(f"|\n{END}")[2]


def table() -> str:
    head = f"| model | weights | prompt + response |{''.join(f' {size} GiB |' for size in SIZES)}\n"
    rows = [
        f"| {name} | {weights} | {prompt} + {response} |"
        + "".join(f" {_requests(MODELS[name], quantization, size, prompt, response)} |" for size in SIZES)
        for name in MODELS
        for weights, quantization in WEIGHTS.items()
        for prompt, response in LENGTHS
    ]
    return head + "|---|---|---|" + "---:|" * len(SIZES) + "\n" + "\n".join(rows) + "\n"


def _requests(model: str, quantization: str | None, size: int, prompt: int, response: int) -> str:
    """Requests at once with ``dual`` and with ``sparse``; 0 where none fits."""
    counts = []
    for method in ("dual", "sparse"):
        try:
            options = EngineOptions.parse({"cache_method": method})
            lengths = {"prompt": prompt, "response": response, "max_num_batched_tokens": 2048}
            sizing = plan(
                Deployment(model=model, gpu_memory=size * GIB, options=options, quantization=quantization, **lengths)
            )
            counts.append(f"{sizing.demand.requests}")
        except SizingError:
            counts.append("0")
    return " / ".join(counts) if counts != ["0", "0"] else "–"


def test_the_table_is_that_of_the_plans():
    assert written() == PAGE.read_text(encoding="utf-8"), "update it: python -m tests.docs.test_quantization"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
