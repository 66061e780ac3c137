"""``vllm serve`` and ``dllm serve`` of the demo model, asked by the real OpenAI client."""

import json
import subprocess
from functools import partial

import openai
import pytest

from dllm_engine.demo import demo_model_path
from dllm_engine.demo.tasks import make_examples
from tests.support.engines import demo_answers
from tests.support.preloaded import preloaded_programs
from tests.support.server import scrape

pytestmark = pytest.mark.slow

MAX_MODEL_LEN = 512
GEN_LENGTH = 32
BLOCK = {"vllm_xargs": {"block_length": 8}}


@pytest.fixture(scope="module")
def server(servers):
    return servers("vllm", "serve", demo_model_path(), "--max-model-len", str(MAX_MODEL_LEN))


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


@pytest.fixture(scope="module")
def examples():
    return make_examples("names", 4, seed=11) + make_examples("reverse", 2, seed=11)


@pytest.fixture(scope="module")
def offline(engines, examples):
    """The same questions answered by ``LLM.chat``."""
    return demo_answers(engines, examples)


def ask(client, model, text, **options):
    extra = BLOCK | options.pop("extra_body", {})
    options = {"max_tokens": GEN_LENGTH} | options
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], extra_body=extra, **options
    )


def figures_of(choice) -> dict:
    return choice.model_extra["diffusion"]


@pytest.fixture(params=["chat", "completions"])
def endpoint(request, client, model, examples):
    """Functions that ask an endpoint a question, and that read the text of a choice."""
    prompt = examples[0].prompt
    if request.param == "chat":
        return partial(
            ask, client, model, prompt
        ), lambda choice: (getattr(choice, "delta", None) or choice.message).content
    asked = {"model": model, "prompt": prompt, "max_tokens": GEN_LENGTH}
    return partial(client.completions.create, **asked), lambda choice: choice.text


def test_chat_gives_the_text_and_figures_of_offline_generation(client, model, examples, offline):
    """Usage does not count the tokens of the last block that lie behind the end."""
    for example, expected in zip(examples, offline, strict=True):
        answer = ask(client, model, example.prompt)
        assert answer.choices[0].message.content == expected.text
        assert answer.choices[0].finish_reason == expected.finish_reason
        figures = figures_of(answer.choices[0])
        assert figures["forward_passes"] == expected.diffusion.forward_passes
        assert figures["tokens_per_forward"] == 1.0
        assert "trace" not in figures
        *_, last = ask(client, model, example.prompt, stream=True, stream_options={"include_usage": True})
        for usage in (answer.usage, last.usage):
            assert usage.completion_tokens == len(expected.token_ids) <= expected.diffusion.tokens_unmasked
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert offline[0].diffusion.tokens_unmasked > len(offline[0].token_ids)


def test_streaming_by_step_shows_the_running_block(endpoint):
    create, text_of = endpoint
    (whole,) = create(extra_body=BLOCK).choices
    by_step = {"vllm_xargs": {"block_length": 8, "stream_granularity": "step"}}
    chunks = list(create(stream=True, extra_body=by_step))
    usual = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(text_of(chunk) or "" for chunk in usual) == text_of(whole)
    assert usual[-1].finish_reason == whole.finish_reason
    assert figures_of(usual[-1]) == figures_of(whole)
    steps = [chunk.model_extra["provisional"] for chunk in chunks if "provisional" in chunk.model_extra]
    assert not any(chunk.choices for chunk in chunks if "provisional" in chunk.model_extra)
    pieces = {}
    for step in steps:
        pieces |= zip(step["positions"], step["pieces"], strict=True)
        pieces |= dict.fromkeys(step["special"], "")
        filled = sum(p // 8 == step["block"] for p in pieces)
        if step["step"] == 8:  # the last of its block
            assert filled == 8
    assert "".join(pieces[p] for p in sorted(pieces)).startswith(text_of(whole))
    assert steps[-1]["forward_pass"] == steps[-1]["diffusion"]["forward_passes"] == figures_of(whole)["forward_passes"]
    assert len({(chunk.id, chunk.model) for chunk in chunks if chunk.id}) == 1


def test_a_stream_of_several_prompts_is_refused_as_a_whole(client, model, server):
    prompts = ["Hello!", "say <|mdm_mask|>"]
    with pytest.raises(openai.BadRequestError, match="mask token"):
        client.completions.create(model=model, prompt=prompts, stream=True, max_tokens=GEN_LENGTH)
    assert scrape(server.url)["vllm:num_requests_running"] == 0


def test_metrics_grow_by_the_figures_of_the_requests(client, server, model, examples):
    before = scrape(server.url)
    regex = {"structured_outputs": {"regex": "Ida=[0-9]{2}"}}
    answers = [ask(client, model, examples[i].prompt, extra_body=regex if i == 2 else {}) for i in range(3)]
    figures = [figures_of(answer.choices[0]) for answer in answers]
    after = scrape(server.url)
    grown = {name: after[name] - before[name] for name in after}
    assert grown["vllm:diffusion_num_committed_tokens_total"] == sum(f["tokens_unmasked"] for f in figures)
    assert grown["steps:full"] == sum(f["denoising_steps"] for f in figures)
    assert grown["vllm:dllm_request_pages_held_count"] == 3
    assert grown["vllm:dllm_constrained_requests_total"] == grown["vllm:dllm_automaton_builds_total"] == 1


def test_vllms_benchmark_runs_against_the_server(server, model, tmp_path):
    command = [preloaded_programs() / "vllm", "bench", "serve", "--base-url", server.url, "--model", model]
    command += "--dataset-name random --random-input-len 20 --random-output-len 24 --ignore-eos".split()
    command += "--num-prompts 8 --max-concurrency 4 --disable-tqdm --save-result --result-filename result.json".split()
    command += ["--result-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (8, 0)
    assert result["total_output_tokens"] == 8 * 24
