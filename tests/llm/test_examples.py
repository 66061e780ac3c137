"""The examples that need no server, in this process."""

import importlib
import json
import re

import pytest

from tests.support.engines import keep


@pytest.fixture
def run(monkeypatch, capsys):
    def run(name):
        program = importlib.import_module(f"examples.{name}")
        started = program.LLM

        def start(*args, **settings):
            return keep(started(*args, **settings, kv_cache_memory_bytes=64 << 20))

        monkeypatch.setattr(program, "LLM", start)
        program.main()
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", ["offline_generate", "plain_vllm"])
def test_an_example_answers(run, name):
    assert "Ida=07, Tom=48" in run(name)


def test_the_tour_shows_all_that_it_announces(run):
    printed = run("tour")
    assert printed.count("took ") == 6
    assert "→ Ida lives in Oslo." in printed
    assert re.search("░.*\n", printed)  # a canvas with masks
    assert "→ Oslo: Paris 0" in printed
    assert "Ida=07" in printed
    assert "→ Ben lives in Rome." in printed
    shared = int(re.search(r"(\d+) of \d+ tokens of the prompt came", printed)[1])
    assert shared > 0


def test_the_structured_output_example_prints_what_it_asked_for(run):
    printed = run("structured_output")
    assert re.search(r"regex: ' ?Max=[0-9]{2}, Tom=[0-9]{2}'", printed)
    assert re.search("choice: '(Ida|Max|Tom)'", printed)
    assert re.search(
        r"""JSON schema: '{"name": ?"(Ida|Max|Tom)", ?"number": ?\d{1,2}}'""", printed
    )


def test_the_rollouts_say_how_each_token_came_to_be(run):
    *rollouts, difference = run("rollouts").splitlines()
    rollouts = [json.loads(line) for line in rollouts]
    assert len(rollouts) == 8
    assert any(rollout["reward"] == 1 for rollout in rollouts)
    for rollout in rollouts:
        assert (
            len(rollout["response_token_ids"])
            == len(rollout["committed_at"])
            == len(rollout["logprobs"])
        )
    assert float(difference.split()[-1]) < 1e-3


def test_the_sparse_example_compares_the_caches(run):
    figures = re.findall(
        r"^(\w+): .* tokens/s, ([\d,]+) tokens computed, ([\d,]+) pages held",
        run("offline_sparse"),
        re.MULTILINE,
    )
    (sparse, computed, pages), (none, computed_none, no_pages) = figures
    assert (sparse, none, no_pages) == ("sparse", "none", "0")
    assert int(computed.replace(",", "")) < int(computed_none.replace(",", ""))
    assert int(pages.replace(",", "")) > 0
