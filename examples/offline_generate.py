"""Answer a batch of prompts with this project's ``LLM``.

python examples/offline_generate.py
"""

from dllm_engine import LLM, DiffusionParams

MODEL = "demo"
"""A folder or Hugging Face name, such as ``GSAI-ML/LLaDA-8B-Instruct``."""
PROMPTS = (
    "Tom=48. Ida=07. Max=31. Give: Ida, Tom",
    "Tom lives in Paris. Ida lives in Oslo. Where does Ida live?",
    "Reverse: Rome Tom Oslo",
    "Hello!",
)


def main() -> None:
    llm = LLM(MODEL)
    # One list, not one call per prompt: the engine then runs all of them in the same
    # forward passes.
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    # 32 steps, then half of them: two tokens per forward pass, unmasked independently
    # of each other.
    for steps in (32, 16):
        params = DiffusionParams(gen_length=32, block_length=8, steps=steps)
        for prompt, output in zip(PROMPTS, llm.chat(chats, params), strict=True):
            completion = output.outputs[0]
            figures = completion.diffusion
            print(f"{prompt}\n  → {completion.text.strip()}")
            print(
                f"    {figures.tokens_unmasked} tokens in {figures.forward_passes} "
                f"forward passes"
            )


if __name__ == "__main__":
    main()
