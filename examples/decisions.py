"""Decide typed fields together, with the probability of each value.

python examples/decisions.py
"""

import argparse
import os

# Read when vLLM is imported: one process instead of three starts sooner, and only
# errors are logged.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from dllm_engine import LLM

CODES = ["07", "31", "48", "99"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="demo",
        help="folder or Hugging Face name (default: %(default)s)",
    )
    llm = LLM(parser.parse_args().model)

    questions = [
        "Tom=48. Ida=07. Max=31. Give: Tom, Max",
        "Tom=99. Ida=07. Max=48. Give: Tom, Max",
    ]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    fields = {"Tom": CODES, "Max": CODES}
    for question, decision in zip(
        questions,
        llm.decide(prompts, fields, template=" Tom={Tom}, Max={Max}"),
        strict=True,
    ):
        print(question)
        for name, value in decision.values.items():
            print(f"  {name}: {value} (probability {decision.probabilities[name]:.4f})")
        print(f"  {decision.figures.forward_passes} forward pass")


if __name__ == "__main__":
    main()
