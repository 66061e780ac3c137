"""The sequences of one HTTP request have one source, by which the scheduler lets
requests take turns.
"""

import pytest

PROMPT = "User: Tom=48. Ida=07. Give: Ida\nBot:"


@pytest.fixture
def sources(demo, monkeypatch):
    """The source of each sequence that the scheduler is given."""
    scheduler = demo.llm_engine.engine_core.engine_core.scheduler
    given, add = [], scheduler.add_request

    def noting(request):
        add(request)
        given.append(scheduler.states[request.request_id].source)

    monkeypatch.setattr(scheduler, "add_request", noting)
    return given


@pytest.mark.parametrize(
    "fields",
    [{"prompt": PROMPT, "n": 3, "temperature": 1.0}, {"prompt": [PROMPT] * 3}],
    ids=["n", "prompts"],
)
def test_sequences_of_a_request_have_its_source(client, sources, fields):
    for _ in range(2):
        assert (
            client.post(
                "/v1/completions", json={"model": "demo", "max_tokens": 8} | fields
            ).status_code
            == 200
        )
    assert len(sources) == 6
    assert len({*sources[:3]}) == len({*sources[3:]}) == 1
    assert len({*sources}) == 2


def test_requests_in_python_have_their_own(demo, sources):
    demo.generate([PROMPT] * 3)
    assert len({*sources}) == 3
