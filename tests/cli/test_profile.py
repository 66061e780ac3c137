"""``dllm profile`` and what it measures."""

import json

import pytest

from dllm_engine.cli.main import main
from dllm_engine.options import EngineOptions
from tests.oracles.maskkv import importance
from tests.oracles.models import PlainModel
from tests.support.engines import runner_of


@pytest.mark.parametrize("checkpoint", ["llada-tiny-a", "dream-tiny-a"])
def test_importance_is_one_minus_the_mean_cosine_of_each_layer(engines, reference_checkpoints, checkpoint):
    llm = engines(reference_checkpoints / checkpoint, max_model_len=128)
    prompt = [7 * i % 480 for i in range(20)]
    plain = PlainModel(reference_checkpoints / checkpoint)
    found, canvas = llm.profile_layers(prompt, 8), prompt + [runner_of(llm).mask_token_id] * 8
    assert list(found) == ["layer_importance", "attention_importance"]
    for (name, scores), of_attention in zip(found.items(), (False, True), strict=True):
        assert scores == pytest.approx(importance(plain, canvas, of_attention=of_attention), abs=1e-5), name
    assert found["layer_importance"] != found["attention_importance"]


def test_what_cannot_be_profiled_is_named(engines, reference_checkpoints, tiny_sdar):
    llm = engines(reference_checkpoints / "llada-tiny-a", max_model_len=128)
    with pytest.raises(ValueError, match=r"129 tokens: .* at most 128"):
        llm.profile_layers([1] * 97)
    with pytest.raises(ValueError, match="at least 1 of prompt"):
        llm.profile_layers([])
    with pytest.raises(ValueError, match="not for SDAR, whose attention goes by blocks; no profile is needed"):
        engines(tiny_sdar).profile_layers([5] * 20)


def test_the_file_is_what_maskkv_reads(tmp_path, monkeypatch, demo, capsys):
    monkeypatch.setattr("dllm_engine.cli.profile_layers.load", lambda arguments: demo)
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "Copy: Rome Tom"}, {"messages": [{"role": "user", "content": "Reverse: Rome Tom Oslo"}]}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tmp_path / "profile.json"
    assert main(["profile", "demo", "--prompts", str(prompts), "--output", str(output)]) == 0
    profile = json.loads(output.read_text())
    assert (profile["model"], profile["num_prompts"], profile["gen_length"]) == ("demo", 2, 32)
    chats = [[{"role": "user", "content": "Copy: Rome Tom"}], lines[1]["messages"]]
    tokenize = demo.get_tokenizer().apply_chat_template
    each = [demo.profile_layers(tokenize(c, add_generation_prompt=True, return_dict=False)) for c in chats]
    for layer_budget, name in (("boundary", "layer_importance"), ("squeeze", "attention_importance")):
        of_prompts = zip(*(measured[name] for measured in each), strict=True)
        assert profile[name] == pytest.approx([(a + b) / 2 for a, b in of_prompts])
        cache_options = {"profile": str(output), "layer_budget": layer_budget}
        options = EngineOptions.parse({"cache_method": "maskkv", "cache_options": cache_options})
        assert list(options.cache.profile) == profile[name]
    assert f"profile={output}" in capsys.readouterr().out
