"""A tour of five minutes: answer a prompt, watch an answer come into being, decide, fill
in, and go on with a chat from shared pages.

python examples/tour.py
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dllm_engine import LLM, DiffusionParams, Questions
from dllm_engine.batch import prompt_tokens

FACTS = "Tom lives in Paris. Ida lives in Oslo."
QUESTION = f"{FACTS} Where does Ida live?"
NEXT_QUESTION = "Ben lives in Rome. Where does Ben live?"
PARAMS: dict[str, Any] = {"gen_length": 32, "block_length": 8}


def main() -> None:
    with timed("Start an engine: vLLM loads, in processes of its own"):
        llm = LLM("demo", cache_method="dual", share_prompts=True, page_size=8)
    with timed("1. Answer a prompt"):
        answer = generate(llm)
    with timed("2. Watch the canvas: ░ is a mask, and blocks go from left to right"):
        stream(llm)
    with timed("3. Decide: one forward pass, and the probability of each choice"):
        decide(llm)
    with timed("4. Fill in: a template with a hole of two tokens"):
        fill_in(llm)
    with timed("5. Go on: the next turn reads the first from pages"):
        next_turn(llm, answer)


@contextmanager
def timed(title: str) -> Iterator[None]:
    """Say what comes, and how long it took."""
    print(f"\n{title}", flush=True)
    start = time.monotonic()
    yield
    print(f"   took {time.monotonic() - start:.2f} s", flush=True)


def generate(llm: LLM) -> str:
    (output,) = llm.chat([user(QUESTION)], DiffusionParams(**PARAMS))
    completion = output.outputs[0]
    print(f"   {QUESTION}\n   → {completion.text.strip()}")
    print(f"   {completion.diffusion.forward_passes} forward passes")
    return completion.text


def stream(llm: LLM) -> None:
    """A line per denoising step; in a terminal they replace each other."""
    from vllm.sampling_params import RequestOutputKind

    params = DiffusionParams(stream_granularity="step", **PARAMS)
    params.output_kind = RequestOutputKind.CUMULATIVE
    tokens = prompt_tokens([user(QUESTION)], llm.get_tokenizer())
    llm.llm_engine.add_request("tour", {"prompt_token_ids": tokens}, params)
    end = "\r" if sys.stdout.isatty() else "\n"
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            completion = output.outputs[0]
            running = completion.provisional
            text = completion.text + (running.unsent_text if running else "")
            print(f"   {text.strip():60}", end=end, flush=True)
            if sys.stdout.isatty():
                time.sleep(0.15)  # the demo model is too fast to be watched
    print()


def decide(llm: LLM) -> None:
    cities = ("Paris", "Oslo", "Rome")
    question = {
        "type": "choice",
        "instructions": "Where does Ida live?",
        "choices": [{"value": city} for city in cities],
    }
    ((answer,),) = llm.decide([FACTS], Questions([question]))
    shares = zip(cities, answer.probabilities, strict=True)
    print(f"   → {answer.value}:", ", ".join(f"{city} {p:.3f}" for city, p in shares))


def fill_in(llm: LLM) -> None:
    prompt = [user("Tom=48. Ida=07. Max=31. Give: Tom, Ida")]
    (output,) = llm.fill_in([prompt], [[" Tom=48, Ida=", 2]])
    completion = output.outputs[0]
    print(f"   →{completion.joined} (filled in: {completion.holes[0]!r})")


def next_turn(llm: LLM, answer: str) -> None:
    turns = [user(QUESTION), {"role": "assistant", "content": answer}]
    turns.append(user(NEXT_QUESTION))
    (output,) = llm.chat(turns, DiffusionParams(**PARAMS))
    print(f"   {NEXT_QUESTION}\n   → {output.outputs[0].text.strip()}")
    print(
        f"   {output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens of the "
        f"prompt came from pages"
    )


def user(text: str) -> Any:
    return {"role": "user", "content": text}


if __name__ == "__main__":
    main()
