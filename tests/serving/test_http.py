"""``vllm serve`` and ``dllm serve`` of the demo model, asked by the
real OpenAI client.
"""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from dllm_engine.demo import model_path
from dllm_engine.demo.tasks import make_examples
from tests.support.engines import demo_answers
from tests.support.preloaded import preloaded_programs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(servers):
    return servers("vllm", "serve", model_path("demo"), "--max-model-len", "512")


def test_chat_gives_the_text_and_figures_of_offline_generation(server, engines):
    """Usage does not count the tokens of the last block that lie behind the end."""
    examples = make_examples("names", 4, seed=11) + make_examples("reverse", 2, seed=11)
    offline = demo_answers(engines, examples)
    for example, expected in zip(examples, offline, strict=True):
        answer = server.chat(example.prompt, model_path("demo"))
        assert answer.choices[0].message.content == expected.text
        assert answer.choices[0].finish_reason == expected.finish_reason
        figures = answer.choices[0].model_extra["diffusion"]
        assert figures["forward_passes"] == expected.diffusion.forward_passes
        assert figures["tokens_per_forward"] == 1.0
        assert "trace" not in figures
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *_, last = server.chat(example.prompt, model_path("demo"), **options)
        for usage in (answer.usage, last.usage):
            assert (
                usage.completion_tokens
                == len(expected.token_ids)
                <= expected.diffusion.tokens_unmasked
            )
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert offline[0].diffusion.tokens_unmasked > len(offline[0].token_ids)


def test_two_data_parallel_engines_answer_as_one_process(engines, servers):
    examples = make_examples("names", 6, seed=31) + make_examples("reverse", 4, seed=31)
    expected = [
        answer.text
        for answer in demo_answers(
            engines, examples, cache_method="sparse", page_size=32
        )
    ]
    options = (
        "--data-parallel-size 2 --max-model-len 512 --cache-method sparse"
    ).split()
    server = servers("dllm", "serve", "demo", *options)
    with ThreadPoolExecutor(len(examples)) as clients:
        answers = clients.map(lambda example: server.chat(example.prompt), examples)
        assert [answer.choices[0].message.content for answer in answers] == expected
    assert server.stop() == 0, server.tail()


def test_vllms_benchmark_runs_against_the_server(server, tmp_path):
    command = [
        preloaded_programs() / "vllm",
        "bench",
        "serve",
        "--base-url",
        server.url,
        "--model",
        model_path("demo"),
    ]
    command += "--dataset-name random --random-input-len 20 --random-output-len 24 --ignore-eos".split()
    command += "--num-prompts 8 --max-concurrency 4 --disable-tqdm --save-result --result-filename result.json".split()
    command += ["--result-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (8, 0)
    assert result["total_output_tokens"] == 8 * 24
    assert (
        result["diffusion_steps_per_canvas"],
        result["diffusion_committed_per_step"],
    ) == (8, 1)
