"""The same models through vLLM's own classes: with dllm-engine installed, its plugin
does the rest.

python examples/plain_vllm.py
python examples/plain_vllm.py --model GSAI-ML/LLaDA-8B-Instruct
"""

import argparse
import os

# Read when vLLM is imported: one process instead of three starts sooner, and only
# errors are logged.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams

from dllm_engine.demo import model_path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default=model_path("demo"),
        help="folder or Hugging Face name (default: demo model)",
    )
    args = parser.parse_args()

    # Options of the diffusion engine travel in additional_config, those of a request in
    # extra_args.
    llm = LLM(args.model, additional_config={"dllm": {"cache_method": "none"}})
    params = SamplingParams(
        temperature=0.0, max_tokens=32, extra_args={"block_length": 8}
    )

    messages = [{"role": "user", "content": "Tom=48. Ida=07. Max=31. Give: Ida, Tom"}]
    (output,) = llm.chat(messages, params)
    print(output.outputs[0].text.strip())


if __name__ == "__main__":
    main()
