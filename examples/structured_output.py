"""Answers that match a regular expression, a list of texts or a JSON schema.

python examples/structured_output.py
"""

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
MATCHES = {
    "regex": StructuredOutputsParams(regex=r" ?Max=[0-9]{2}, Tom=[0-9]{2}"),
    "choice": StructuredOutputsParams(choice=["Ida", "Max", "Tom"]),
    "JSON schema": StructuredOutputsParams(json=SCHEMA),
}


def main() -> None:
    llm = LLM("demo")
    messages = [{"role": "user", "content": QUESTION}]
    for name, match in MATCHES.items():
        params = DiffusionParams(gen_length=32, structured_outputs=match)
        (output,) = llm.chat(messages, params, use_tqdm=False)
        print(f"{name}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
