"""Inspections show what was recorded, all of it, and nothing that a model wrote becomes markup."""

import re
from html.parser import HTMLParser

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.cli import inspect_cache
from dllm_engine.cli.main import main
from dllm_engine.figures import DiffusionFigures
from dllm_engine.inspection.record import Inspection, pieces_of, replay
from dllm_engine.scheduler.request import Span
from tests.support.plans import spec_of

MARKUP = '<script>alert("&amp;")</script>'
PROMPT = ["User:", f" {MARKUP}", "\n", "Bot", ":"]
SPEC = spec_of(prompt_length=len(PROMPT), gen_length=12, block_length=4, steps=12)
RETAINED = [[[0, 1, 4, 9, 10], [0, 2, 3, 4, 12]], [[0, 1, 2, 5, 6], [3, 4, 5, 7, 8]]]
"""Per block and layer."""


def make_figures(states, unmasked, computed, retained):
    trace = {
        "refresh_states": states,
        "unmasked_per_step": unmasked,
        "windows": [tuple(SPEC.block_span((positions[0] - 5) // 4)) for positions in unmasked],
        "computed_positions": computed,
        "retained_positions": retained,
    }
    rows = sum(17 if positions is None else len(positions) for positions in computed)
    return DiffusionFigures(len(states), len(states), sum(map(len, unmasked)), rows, trace=trace)


def make_inspection(**changes):
    """Two layers, two of three blocks; the second ends with an end token at its second position."""
    figures = make_figures(
        states=["full", "update", "reuse", "update", "reuse"],
        unmasked=[[6], [5, 8], [7], [9, 11], [10, 12]],
        computed=[None, None, [5, 6, 7, 8], None, [9, 10, 11, 12]],
        retained=RETAINED,
    )
    fields = {"model": "demo", "cache_method": "sparse", "cache_options": {"retention_ratio": 0.4}}
    fields |= {"page_size": 4, "num_layers": 2, "gen_length": 12, "windows": replay(figures)}
    fields |= {"prompt_tokens": list(range(len(PROMPT))), "prompt_pieces": PROMPT}
    fields |= {"response_tokens": [10, 11, 12, 13, 14, 1]}
    fields |= {"response_pieces": [" a", MARKUP, "\n", "", "é", "<|endoftext|>"]}
    fields |= {"block_spans": [SPEC.block_span(block) for block in range(3)]}
    return Inspection(**(fields | changes))


class Page(HTMLParser):
    """The tags of a page, its attributes, and its text; checks that every tag is closed in its turn."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        self.open += [tag] * (tag != "meta")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def saved_page(inspection, tmp_path):
    path = tmp_path / "inspection.html"
    inspection.save(path)
    return path.read_text(encoding="utf-8")


@pytest.fixture
def source(tmp_path):
    return saved_page(make_inspection(), tmp_path)


def drawn_positions(path):
    """The columns and the row that a path of strokes covers."""
    strokes = re.findall(r"M(\d+) ([\d.]+)h(\d+)", path)
    columns = [column for start, _, size in strokes for column in range(int(start), int(start) + int(size))]
    return columns, {float(row) for _, row, _ in strokes}


# The record


def test_a_block_that_ends_before_its_update_retained_nothing():
    """One step per block and a delay of one: only the second block, which takes two, reaches its update."""
    figures = make_figures(
        states=["full", "full", "update", "full"],
        unmasked=[[5, 6, 7, 8], [9, 10], [11, 12], [13, 14, 15, 16]],
        computed=[None] * 4,
        retained=RETAINED[1:],
    )
    inspection = make_inspection(windows=replay(figures))
    assert [block.retained for block in inspection.windows] == [[], RETAINED[1], []]
    assert inspection.prompt_share == [0.5, 0.5, 0.5, 0.5, 0.5]


def test_what_reuse_steps_compute_is_not_evicted():
    """Fast-dLLM's prefix cache: the suffix is neither retained nor evicted."""
    suffix = list(range(5, 17))
    prefix = [list(range(5))] * 2
    figures = make_figures(["update", "reuse"], [[5, 6], [7, 8]], [None, suffix], [prefix])
    inspection = make_inspection(cache_method="prefix", cache_options={}, windows=replay(figures))
    (block,) = inspection.windows
    assert block.recomputed == suffix
    assert not inspection.evicts(block)
    sparse = make_inspection()
    assert sparse.evicts(sparse.windows[0])


def test_the_summary_says_what_was_kept_and_what_it_cost():
    cache, cost = make_inspection().summary
    assert cache == (
        "sparse (retention_ratio=0.4): a layer retained 38% of the positions outside the block; at most 4 pages of "
        "4 tokens over 2 layers"
    )
    assert cost == "5 forward passes computed 59 tokens, 69% of the 85 that computing the whole canvas in each takes"


def test_a_character_of_several_tokens_stands_at_its_last():
    parts = {1: b"a", 2: b"\xc3", 3: b"\xa9", 4: b"\xff"}

    def decode(tokens):
        return b"".join(parts[token] for token in tokens).decode(errors="replace")

    assert pieces_of([1, 2, 3, 1], decode) == ["a", "", "é", "a"]
    assert "".join(pieces_of([4, 4, 4, 4, 4, 1], decode)) == "\ufffd" * 5 + "a"
    assert pieces_of([7, 12], None) == ["7 ", "12 "]


# The page


def test_the_page_is_well_formed_and_needs_nothing_else(source):
    page = Page(source)
    assert {"script", "link", "img", "iframe"}.isdisjoint(page.tags)
    assert {"src", "href"}.isdisjoint(name for name, _ in page.attributes)
    assert "url(" not in "".join(page.texts)
    assert "prefers-color-scheme: dark" in "".join(page.texts)


def test_text_of_the_model_is_never_markup(tmp_path):
    inspection = make_inspection(model=MARKUP, cache_options={"scope": MARKUP})
    source = saved_page(inspection, tmp_path)
    assert "<script" not in source
    # Title twice (model, option), heading twice, one prompt token, one response token.
    assert "".join(Page(source).texts).count(MARKUP) == 6


def test_the_maps_show_exactly_what_was_retained(source):
    rows = re.findall(r'<g><title>layer \d+: \d+ retained</title><path d="([^"]*)"', source)
    expected = [(layer, positions) for block in RETAINED for layer, positions in enumerate(block)]
    assert len(rows) == len(expected)
    for path, (layer, positions) in zip(rows, expected, strict=True):
        assert drawn_positions(path) == (positions, {layer + 0.5})
    assert source.count("<figure>") == 2
    assert source.count("retained <b>5</b> of 13 outside the block (38%) · 4 pages") == 2


def test_prompt_tokens_are_shaded_by_the_share_of_layers_and_response_tokens_carry_their_steps(source):
    shades = re.findall(r'--s:([\d.]+)" title="position (\d+): retained by ([\d.]+) of 2 layers"', source)
    assert shades == [("0.75", "0", "1.5"), *[("0.5", str(p), "1") for p in (1, 2, 3)], ("0.75", "4", "1.5")]
    steps = re.findall(r'title="position (\d+): unmasked in step (\d+)"', source)
    assert [int(position) for position, _ in steps] == [*range(5, 13)]
    assert [int(step) for _, step in steps] == [2, 1, 3, 2, 4, 5, 4, 5]
    assert source.count('class="cut"') == 2  # unmasked, but after the end token
    assert "4 positions stayed masked" in source


def test_a_method_that_keeps_nothing_shows_the_order_alone(tmp_path):
    figures = make_figures(["full"] * 2, [[5, 6], [7, 8]], [None] * 2, [])
    inspection = make_inspection(cache_method="none", cache_options={}, windows=replay(figures))
    source = saved_page(inspection, tmp_path)
    Page(source)
    assert "<figure>" not in source
    assert "Nothing was retained, every step computed the whole canvas." in source
    assert "unmasked in step 2" in source


# The engine


@pytest.fixture(scope="module")
def sparse_demo(engines):
    return engines("demo", skip_tokenizer_init=False, cache_method="sparse", page_size=8)


def test_an_engine_shows_its_request(sparse_demo, tmp_path):
    prompt = "Tom=48. Ida=07. Max=31. Give: Ida, Tom"
    params = DiffusionParams(gen_length=32, block_length=8, retention_ratio=0.25)
    messages = [{"role": "user", "content": prompt}]
    answer = sparse_demo.chat(messages, params, use_tqdm=False)[0].outputs[0].text
    inspection = sparse_demo.inspect(messages, params)
    assert "".join(inspection.prompt_pieces) == f"User: {prompt}\nBot:"
    assert "".join(inspection.response_pieces).startswith(answer)
    assert answer.startswith(" Ida=")
    assert (inspection.model, inspection.num_layers) == ("demo", 4)
    assert inspection.cache_options["retention_ratio"] == 0.25
    retained = (inspection.canvas_length - 8) // 4
    for block in inspection.windows:
        assert [len(layer) for layer in block.retained] == [retained] * 4
        assert not set(range(*block.span)).intersection(*block.retained)
        states = [step.state.value for step in block.passes]
        assert states == ["full", "update", *["reuse"] * 6][: len(states)]
        assert inspection.pages(block) == 4 * -(-retained // 8)
    assert all(len(block.passes) == 8 for block in inspection.windows[:-1])  # an end token may end the last
    steps = inspection.steps_of(Span(inspection.prompt_length, inspection.canvas_length))
    assert sorted(step for step in steps if step is not None) == list(range(1, len(inspection.passes) + 1))
    assert inspection.prompt_pieces[0] in "".join(Page(saved_page(inspection, tmp_path)).texts)


def test_blocks_see_nothing_behind_them_and_share_pages(engines, tiny_sdar, tmp_path):
    llm = engines(tiny_sdar, page_size=8, enable_prefix_caching=True)
    llm.reset_prefix_cache()
    prompt, params = {"prompt_token_ids": [*range(18)]}, DiffusionParams(gen_length=8, ignore_eos=True)
    first, again = (llm.inspect(prompt, params) for _ in range(2))
    assert [tuple(window.span) for window in first.windows] == [(18, 20), (20, 24), (24, 28)]
    assert [window.retained for window in first.windows] == [[[*range(n)]] * 2 for n in (16, 20, 24)]
    assert [inspection.num_shared for inspection in (first, again)] == [0, 16]
    assert [window.retained for window in again.windows] == [window.retained for window in first.windows]
    assert again.canvas_length == 28, "two positions behind the response are computed"
    # The first block is fed with what the prompt has of it.
    assert first.windows[0].recomputed == [16, 17, 18, 19]
    assert not any(first.evicts(window) for window in first.windows)
    assert [first.outside(window) for window in first.windows] == [18, 20, 24]
    assert again.summary[0].endswith("over 2 layers; 16 tokens found in shared pages")
    source = saved_page(again, tmp_path)
    Page(source)
    assert "<dt>found in shared pages</dt><dd>16 " in source
    assert source.count('class="cut"') == 2
    assert "after the end of the answer" in source
    assert source.count('<path d="M0 1.0h20"') == 1, "nothing is behind the first block"


def test_a_prompt_of_token_ids_needs_no_tokenizer(engines, tiny_llada):
    inspection = engines(tiny_llada).inspect({"prompt_token_ids": [5, 6, 7]}, DiffusionParams(gen_length=8))
    assert inspection.prompt_pieces == ["5 ", "6 ", "7 "]
    assert inspection.model == tiny_llada.name


def test_what_cannot_be_shown_is_refused(engines, tiny_llada, sparse_demo):
    with pytest.raises(ValueError, match="trace=True"):
        engines(tiny_llada, trace=False).inspect({"prompt_token_ids": [5]})
    with pytest.raises(ValueError, match="n=2"):
        sparse_demo.inspect("Hello!", DiffusionParams(n=2, temperature=1.0, gen_length=8))


def test_a_method_that_keeps_every_position_evicts_nothing():
    figures = make_figures(
        states=["update", "update", "reuse", "update", "reuse"],
        unmasked=[[6], [5, 8], [7], [9, 11], [10, 12]],
        computed=[None, None, [5, 7], None, [10, 12]],
        retained=[],
    )
    inspection = make_inspection(cache_method="dkv", windows=replay(figures))
    assert "nothing was evicted, pages held every position of the canvas" in inspection.summary[0]
    assert inspection.updated_windows == []


@pytest.mark.parametrize(("model", "method"), [("demo", "sparse"), ("demo-blocks", "auto")])
def test_the_command_draws_what_suits_the_models_attention(monkeypatch, capsys, model, method):
    def start_engine(args, *, trace):
        raise ValueError(f"asked for {args.cache_method}")

    monkeypatch.setattr(inspect_cache, "start_engine", start_engine)
    assert main(["inspect", "--model", model]) == 2
    assert capsys.readouterr().err == f"dllm: error: asked for {method}\n"
