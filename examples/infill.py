"""Fill in what lies between given texts.

python examples/infill.py
"""

from dllm_engine import LLM, DiffusionParams

QUESTION = "Tom=48. Ida=07. Max=31. Give: Tom, Ida, Max"


def main() -> None:
    llm = LLM("demo")

    # A text between two others: four tokens.
    prefix, suffix = f"User: {QUESTION}\nBot: Tom=48,", ", Max=31"
    (output,) = llm.infill(prefix, suffix, DiffusionParams(gen_length=4))
    print(f"between the texts: {output.outputs[0].text!r}")

    # An answer with two holes of two tokens each.
    template: list[str | int] = [" Tom=", 2, ", Ida=", 2, ", Max=31"]
    (output,) = llm.fill_in([[{"role": "user", "content": QUESTION}]], [template])
    completion = output.outputs[0]
    print(f"holes: {completion.holes}")
    print(f"whole answer: {completion.joined!r}")


if __name__ == "__main__":
    main()
