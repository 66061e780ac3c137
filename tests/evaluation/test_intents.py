"""Questions of intents, as a package ships them."""

import json

import pytest

from dllm_engine.evaluation.intents import read_intents
from dllm_engine.evaluation.own_tasks import named_task


def test_the_questions_of_an_installed_package(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"intents: .* install it"):
        named_task("intents", None, 0, "exact")
    folder = tmp_path / "jev_style/web/demo-data/chinese"
    folder.mkdir(parents=True)
    texts = {"de-DE": "stell den wecker", "en-US": "set the alarm"}
    item = {"candidates": ["lists", "alarm"], "gold": "alarm", "utt": texts}
    content = {"instructions": "What is asked for?", "items": [item] * 3}
    (folder / "massive_dev_subset.json").write_text(json.dumps(content))
    metadata = tmp_path / "jev_style-0.5.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: jev-style\nVersion: 0.5.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len(read_intents("intents-all")) == 6
    first, *_ = read_intents("intents")
    assert first.messages == [
        {"role": "user", "content": '{"utterance": "set the alarm"}'}
    ]
    assert first.question.options[first.answer].label == "alarm"
