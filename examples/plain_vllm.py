"""The same models through vLLM's own classes: with dllm-engine installed, its plugin
does the rest.

python examples/plain_vllm.py
"""

from vllm import LLM, SamplingParams

from dllm_engine.demo import model_path


def main() -> None:
    # Options of the diffusion engine travel in additional_config, those of a request in
    # extra_args.
    llm = LLM(
        model_path("demo"),  # or a folder, or a Hugging Face name
        additional_config={"dllm": {"cache_method": "none"}},
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=32, extra_args={"block_length": 8}
    )
    messages = [{"role": "user", "content": "Tom=48. Ida=07. Max=31. Give: Ida, Tom"}]
    (output,) = llm.chat(messages, params)
    print(output.outputs[0].text.strip())


if __name__ == "__main__":
    main()
