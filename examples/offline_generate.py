"""Answer a batch of prompts with this project's ``LLM``.

python examples/offline_generate.py
python examples/offline_generate.py --model GSAI-ML/LLaDA-8B-Instruct --gen-length 128
--block-length 32
"""

import argparse
import os

# Read when vLLM is imported: one process instead of three starts sooner, and only
# errors are logged.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from dllm_engine import LLM, DiffusionParams

PROMPTS = (
    "Tom=48. Ida=07. Max=31. Give: Ida, Tom",
    "Tom lives in Paris. Ida lives in Oslo. Where does Ida live?",
    "Reverse: Rome Tom Oslo",
    "Hello!",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default="demo",
        help="folder or Hugging Face name (default: %(default)s)",
    )
    parser.add_argument(
        "--gen-length",
        type=int,
        default=32,
        help="response tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--block-length",
        type=int,
        default=8,
        help="denoised together (default: %(default)s)",
    )
    args = parser.parse_args()

    llm = LLM(args.model)
    params = DiffusionParams(gen_length=args.gen_length, block_length=args.block_length)

    # One list, not one call per prompt: the engine then runs all of them in the same
    # forward passes.
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    for prompt, output in zip(PROMPTS, llm.chat(conversations, params), strict=True):
        completion = output.outputs[0]
        figures = completion.diffusion
        print(f"{prompt}\n  → {completion.text.strip()}")
        print(
            f"    {figures.tokens_unmasked} tokens in {figures.forward_passes} forward "
            f"passes"
        )

    # Half the steps: two tokens per forward pass, unmasked independently of each other.
    faster = DiffusionParams(
        gen_length=args.gen_length,
        block_length=args.block_length,
        steps=args.gen_length // 2,
    )
    completion = llm.chat(conversations[0], faster)[0].outputs[0]
    print(f"with half the steps\n  → {completion.text.strip()}")
    print(f"    {completion.diffusion.tokens_per_forward:g} tokens per forward pass")


if __name__ == "__main__":
    main()
