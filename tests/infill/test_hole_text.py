"""The text of a hole without its edges and without repeats of the text behind it."""

from typing import Any

import pytest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from dllm_engine.decoding.probe import Logprobs
from dllm_engine.infill.edges import Edge, Opened, vocabulary_of
from dllm_engine.infill.hole_text import HoleText
from dllm_engine.infill.template import Template
from tests.support.engines import assert_nothing_left
from tests.support.http_app import chunks_of


def run(passes: Any, answers: list[float]) -> Any:
    """The result of passes, if every token of the n-th text has the log-probability
    ``answers[n]``. A text has two probes.
    """
    try:
        probes = passes.send(None)
        assert len(probes) == 2 * len(answers)
        passes.send(
            [
                Logprobs([answers[number // 2]] * len(probe.tokens), [])
                for number, probe in enumerate(probes)
            ]
        )
    except StopIteration as end:
        return end.value
    raise AssertionError("another pass")


def opened_hole(
    tokenizer: Any, before: str, behind: str, edges: Any = ("", "")
) -> Opened:
    prompt, given = (
        tokenizer.encode(text, add_special_tokens=False) for text in (before, behind)
    )
    sides = [Edge(text=text) for text in edges]
    template = Template((None, given))
    return Opened(prompt, template, vocabulary_of(tokenizer), *sides)


@pytest.mark.parametrize(
    "kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE]
)
@pytest.mark.parametrize("size", [1, 2, 5, 20])
@pytest.mark.parametrize(
    ("stop_reason", "answers", "wanted"),
    [
        (None, [-2.0, -1.0], "nt(x, 1"),
        (None, [-1.0, -2.0], "nt(x, 1nt(y"),
        ("; ", [], "nt(x, 1nt(ynt"),
    ],
)
def test_a_stream_shows_no_text_that_is_left_out_later(
    demo, kind, size, stop_reason, answers, wanted
):
    whole, shown = "int(x, 1nt(ynt", ""
    tokenizer = demo.get_tokenizer()
    opened = opened_hole(tokenizer, "f = ", "(y, 2)", ("i", "nt"))
    text = HoleText(opened, SamplingParams(output_kind=kind), tokenizer)
    in_parts = kind is RequestOutputKind.DELTA
    for end in range(size, len(whole) + size, size):
        is_last = end >= len(whole)
        completion = CompletionOutput(
            index=0,
            text=whole[end - size : end] if in_parts else whole[:end],
            token_ids=[],
            cumulative_logprob=None,
            logprobs=None,
            finish_reason="stop" if is_last else None,
            stop_reason=stop_reason if is_last else None,
        )
        run(text.cut(completion), answers if is_last else [])
        shown = shown + completion.text if in_parts else completion.text
        assert wanted.startswith(shown)
    assert shown == wanted


COPIED, REST = "Turin Tokyo Pia Accra Delhi Zoe Tom Ole", " Jan Ida Rome Ann"
"""Words that the demo model copies. It takes a hole of three tokens for ``Jan Ida``."""


@pytest.mark.parametrize(
    ("prefix", "suffix", "wanted"),
    [
        (f"User: Copy: {COPIED}{REST}\nBot: {COPIED}", " Rome Ann", " Jan Ida"),
        # The hole ends as the suffix begins, and this is right.
        ("User: Hello!\nBot: ", "lo! How can I help you?", "Hel"),
    ],
)
def test_an_end_that_repeats_the_suffix_is_dropped_unless_it_is_probable(
    demo, client, prefix, suffix, wanted
):
    (completion,) = demo.infill(prefix, suffix)[0].outputs
    assert (completion.text, completion.holes) == (wanted, [wanted])
    assert completion.joined == wanted + suffix
    body = {"model": "demo", "prompt": prefix, "suffix": suffix}
    (answer,) = client.post("/v1/completions", json=body).json()["choices"]
    assert (answer["text"], answer["holes"]) == (wanted, [wanted])
    chunks = chunks_of(client.post("/v1/completions", json={**body, "stream": True}))
    parts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(parts) == wanted
    assert_nothing_left(demo)
