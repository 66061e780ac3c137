"""What a model's name tells: of the model's own name alone, wherever its folder is."""

import json

import pytest
from transformers import AutoConfig

from dllm_engine.cache_methods import CACHE_METHODS
from dllm_engine.checkpoints import RELEASED_CONFIGS, load_config
from dllm_engine.evaluation.paper_tasks import tasks_of_papers
from dllm_engine.families import released_defaults
from dllm_engine.model_name import has_word, own_name
from dllm_engine.plugin import register

INSTRUCT = "GSAI-ML/LLaDA-8B-Instruct"
BASE = "GSAI-ML/LLaDA-8B-Base"
DREAM = "Dream-org/Dream-v0-Instruct-7B"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (INSTRUCT, "LLaDA-8B-Instruct"),
        ("LLaDA-8B-Instruct", "LLaDA-8B-Instruct"),
        ("/database/LLaDA-8B-Instruct", "LLaDA-8B-Instruct"),
        ("/database/LLaDA-8B-Instruct/", "LLaDA-8B-Instruct"),
        ("/database/LLaDA-8B-Instruct/.", "LLaDA-8B-Instruct"),
        ("~/base/LLaDA-8B-Instruct", "LLaDA-8B-Instruct"),
        ("/hub/models--GSAI-ML--LLaDA-8B-Base/snapshots/0123abcd", "LLaDA-8B-Base"),
        ("/hub/models--GSAI-ML--LLaDA-8B-Base/snapshots/0123abcd/", "LLaDA-8B-Base"),
        (
            "/hub/models--GSAI-ML--LLaDA-8B-Base/snapshots/0123abcd/part",
            "LLaDA-8B-Base",
        ),
        ("/hub/models--LLaDA-8B-Base/snapshots/0123abcd", "LLaDA-8B-Base"),
        ("/modelscope/hub/GSAI-ML/LLaDA-1___5", "LLaDA-1.5"),
    ],
)
def test_the_own_name_is_the_last_one_or_that_of_the_repository(model, name):
    assert own_name(model) == name


def test_the_folder_in_which_a_command_runs_has_a_name(tmp_path, monkeypatch):
    folder = tmp_path / "LLaDA-8B-Base"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert own_name(".") == "LLaDA-8B-Base"
    assert own_name("../LLaDA-8B-Base") == "LLaDA-8B-Base"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("LLaDA-8B-Base", True),
        ("Dream-v0-Base-7B", True),
        ("base_model", True),
        ("llada.BASE", True),
        ("LLaDA-8B-Instruct", False),
        ("database-tuned-LLaDA", False),
        ("LLaDA-basement", False),
    ],
)
def test_a_word_of_a_name_is_a_whole_one(name, says):
    assert has_word(name, "base") is says


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with the config of a released checkpoint, without some of its keys."""

    def put(folder: str, released: str, *left_out: str) -> str:
        path = tmp_path / folder
        path.mkdir(parents=True, exist_ok=True)
        config = {
            key: value
            for key, value in RELEASED_CONFIGS[released].items()
            if key not in left_out
        }
        (path / "config.json").write_text(json.dumps(config))
        return str(path)

    return put


def snapshot_of(model: str) -> str:
    return f"hub/models--{model.replace('/', '--')}/snapshots/0123abcd"


@pytest.mark.parametrize("above", ["database", "home/basement/models", "base"])
def test_folders_above_make_no_base_model(checkpoint, above):
    assert tasks_of_papers(
        checkpoint(f"{above}/LLaDA-8B-Instruct", INSTRUCT), ["gsm8k"], None
    ) == tasks_of_papers(INSTRUCT, ["gsm8k"], None)


@pytest.mark.parametrize(
    "model", [INSTRUCT, BASE, "GSAI-ML/LLaDA-1.5", DREAM, "Dream-org/Dream-v0-Base-7B"]
)
def test_a_snapshot_has_the_papers_settings_of_its_model(checkpoint, model):
    folder = checkpoint(snapshot_of(model), model)
    method = CACHE_METHODS["dllm_cache"]
    family = load_config(folder).family
    assert method.settings_for(folder, family) == method.settings_for(model, family)
    assert method.settings_for(folder, family)[0]
    assert tasks_of_papers(folder, ["gsm8k"], "dllm-cache") == tasks_of_papers(
        model, ["gsm8k"], "dllm-cache"
    )


@pytest.mark.parametrize(
    ("folder", "block_size"),
    [
        ("SDAR-runs-b2/SDAR-8B-Chat", 4),
        ("runs/SDAR-8B-Chat-beta", 4),
        ("runs/SDAR-8B-Chat-b32", 32),
        ("runs/SDAR-8B-Chat-b32/", 32),
        ("hub/models--JetLM--SDAR-8B-Chat-b16/snapshots/0123abcd", 16),
    ],
)
def test_blocks_are_as_long_as_the_own_name_says(checkpoint, folder, block_size):
    register()  # for transformers
    path = checkpoint(folder, "JetLM/SDAR-8B-Chat", "block_size")
    for config in (load_config(path), AutoConfig.from_pretrained(path)):
        assert config.block_size == block_size
    assert AutoConfig.from_pretrained(path, block_size=2).block_size == 2
    stated = checkpoint(folder, "JetLM/SDAR-8B-Chat")
    assert load_config(stated).block_size == 4


@pytest.mark.parametrize("above", ["dreamon-cluster", "home/dreamone", "DreamOn"])
def test_a_folder_above_makes_no_dream_on(checkpoint, above):
    assert (
        load_config(checkpoint(f"{above}/Dream-v0-Instruct-7B", DREAM)).family.name
        == "Dream"
    )


@pytest.mark.parametrize(
    "folder", ["DreamOn-v0-7B", "models--Dream-org--DreamOn-v0-7B/snapshots/0123abcd"]
)
def test_dream_on_is_refused_by_its_own_name(checkpoint, folder):
    with pytest.raises(ValueError, match="DreamOn is not supported: it expands and"):
        load_config(checkpoint(folder, DREAM))


def test_a_copy_of_a_released_checkpoint_has_its_defaults(checkpoint):
    model = "inclusionAI/LLaDA2.1-mini"
    for folder in ("copies/LLaDA2.1-mini", snapshot_of(model)):
        assert (
            released_defaults(load_config(checkpoint(folder, model)))["edit_threshold"]
            == 0.9
        )
    other = checkpoint("LLaDA2.1-mini/tuned", model)
    assert not released_defaults(load_config(other))
