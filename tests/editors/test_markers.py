"""Prompts with markers, as editors make them."""

import pytest

from dllm_engine.editors.markers import read_markers

P, S = "def f(a):\n    ", "\n    return b\n"


@pytest.mark.parametrize(
    "prompt",
    [
        f"<|fim_prefix|>{P}<|fim_suffix|>{S}<|fim_middle|>",
        f"{P}<|fim_suffix|>{S}<|fim_middle|>",
        f"<fim_prefix>{P}<fim_suffix>{S}<fim_middle>",
        f"<PRE> {P} <SUF>{S} <MID>",
        f"<PRE> {P} <SUF> {S} <MID>",
        f"<PRE>{P} <SUF> {S} <MID>",
        f"<｜fim▁begin｜>{P}<｜fim▁hole｜>{S}<｜fim▁end｜>",
        f"[SUFFIX]{S}[PREFIX]{P}",
        f"<s>[SUFFIX]{S}[PREFIX]{P}",
        f"<[fim-prefix]>{P}<[fim-suffix]>{S}<[fim-middle]>",
        f"<|code_suffix|>{S}<|code_prefix|>{P}<|code_middle|><|assistant|>\n",
    ],
)
def test_the_texts_around_the_cursor(prompt):
    assert read_markers(prompt) == (P, S)


@pytest.mark.parametrize(
    "prompt", ["", P, f"{P}<fim_middle>", f"<fim_prefix>{P}<fim_suffix>{S}", "[PREFIX]"]
)
def test_other_prompts_have_none(prompt):
    assert read_markers(prompt) is None


def test_files_of_the_repository_stand_before_the_prefix_with_their_paths():
    context = (
        "<|repo_name|>shop\n<|file_sep|>tax.py\nRATE = 0.19\n<|file_sep|>main.py\n"
    )
    read = read_markers(f"{context}<|fim_prefix|>{P}<|fim_suffix|>{S}<|fim_middle|>")
    assert read == (f"# tax.py\nRATE = 0.19\n# main.py\n{P}", S)
    snippet = f"<file_sep>x = 1\n<file_sep><fim_prefix>{P}<fim_suffix>{S}<fim_middle>"
    assert read_markers(snippet) == (f"x = 1\n{P}", S)
    assert read_markers(f"x = 1\n[SUFFIX]{S}[PREFIX]{P}") == (f"x = 1\n{P}", S)


def test_a_file_that_names_markers_may_be_edited():
    prefix, suffix = f"{P}'<fim_suffix>' + ", "<fim_middle>'\n"
    prompt = f"<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>"
    assert read_markers(prompt) == (prefix, suffix)
