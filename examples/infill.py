"""Fill in what lies between given texts.

python examples/infill.py
"""

import argparse
import os

# Read when vLLM is imported: one process instead of three starts sooner, and only
# errors are logged.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from dllm_engine import LLM, DiffusionParams

QUESTION = "Tom=48. Ida=07. Max=31. Give: Tom, Ida, Max"


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

    # A text between two others: four tokens.
    prefix, suffix = f"User: {QUESTION}\nBot: Tom=48,", ", Max=31"
    (output,) = llm.infill(prefix, suffix, DiffusionParams(gen_length=4))
    print(f"between the texts: {output.outputs[0].text!r}")

    # An answer with two holes of two tokens each.
    template = [" Tom=", 2, ", Ida=", 2, ", Max=31"]
    (output,) = llm.fill_in([[{"role": "user", "content": QUESTION}]], [template])
    completion = output.outputs[0]
    print(f"holes: {completion.holes}")
    print(f"whole answer: {completion.joined!r}")
    print(
        f"{completion.diffusion.tokens_unmasked} tokens in "
        f"{completion.diffusion.forward_passes} forward passes"
    )


if __name__ == "__main__":
    main()
