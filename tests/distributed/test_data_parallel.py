"""`--data-parallel-size 2`: two engines behind one server give the answers of one process."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from dllm_engine.demo.tasks import make_examples
from tests.support.engines import demo_answers

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("model", "method"), [("demo", "sparse"), ("demo-blocks", "block")])
def test_two_data_parallel_engines_answer_as_one_process(engines, servers, monkeypatch, model, method):
    examples = make_examples("names", 6, seed=31) + make_examples("reverse", 4, seed=31)
    expected = [answer.text for answer in demo_answers(engines, examples, model, cache_method=method, page_size=32)]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = ["--data-parallel-size", "2", "--max-model-len", "512", "--cache-method", method]
    server = servers("dllm", "serve", model, *options)
    with ThreadPoolExecutor(len(examples)) as clients:
        answers = clients.map(lambda example: server.chat(example.prompt, model), examples)
        assert [answer.choices[0].message.content for answer in answers] == expected
    assert server.stop() == 0, server.tail()
