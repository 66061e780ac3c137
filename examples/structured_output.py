"""Answers that match a regular expression, a list of texts or a JSON schema.

python examples/structured_output.py
"""

import argparse
import json
import os

# Read when vLLM is imported: one process instead of three starts sooner, and only
# errors are logged.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.sampling_params import StructuredOutputsParams

from dllm_engine import LLM, DiffusionParams

QUESTION = "Tom=48. Ida=07. Max=31. Give: Max, Tom"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ida", "Max", "Tom"]},
        "number": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "number"],
}


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

    def ask(**match: object) -> str:
        params = DiffusionParams(
            gen_length=32, structured_outputs=StructuredOutputsParams(**match)
        )
        (output,) = llm.chat(
            [{"role": "user", "content": QUESTION}], params, use_tqdm=False
        )
        return output.outputs[0].text

    print(f"regex: {ask(regex=r' ?Max=[0-9]{2}, Tom=[0-9]{2}')!r}")
    print(f"choice: {ask(choice=['Ida', 'Max', 'Tom'])!r}")
    print(f"JSON schema: {json.loads(ask(json=SCHEMA))}")


if __name__ == "__main__":
    main()
