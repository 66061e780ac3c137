"""The package of ``docs/research.md``, made, installed and used as it is printed there,
in an environment of its own, by Python and over HTTP.
"""

import itertools
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from dllm_engine import DiffusionParams
from dllm_engine.cache_methods import CACHE_METHODS
from tests.support.checkout import DOCS
from tests.support.engines import assert_nothing_left, generate
from tests.support.environments import NEEDS, install, new_environment
from tests.support.server import Server

PAGE = DOCS / "research.md"
BLOCKS = re.findall(
    r"(?:`(src/\S+\.py)`:\n\n)?^```(\w+)\n(.*?)^```$",
    PAGE.read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE,
)
"""The file that each block is, or nothing; its language and its text."""
PROGRAM = """#!{python}
import sys
from dllm_engine.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    """Variables of a shell in an environment whose own packages are ours, editable, and
    those that we need.
    """
    path_line = f"import site; site.addsitedir({NEEDS!r})"
    python = new_environment(tmp_path_factory.mktemp("environment"), path_line)
    (python.parent / "dllm").write_text(PROGRAM.format(python=python))
    (python.parent / "dllm").chmod(0o755)
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_", "PYTEST_", "PYTHONPATH"))
    }
    # The reader's uv gets setuptools from the network.
    offline = {"UV_OFFLINE": "1", "UV_NO_BUILD_ISOLATION": "1"}
    path = f"{python.parent}:{variables['PATH']}"
    return (
        variables | offline | {"PATH": path, "VIRTUAL_ENV": str(python.parent.parent)}
    )


def write_files(folder):
    """The page's files of the package."""
    for file, _, text in BLOCKS:
        if file:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("model", ["tiny_llada", "tiny_dream"])
def test_the_method_that_keeps_everything_is_dual(
    engines, checkpoint_of, tmp_path, monkeypatch, model
):
    write_files(tmp_path)
    entry = {"key_norm": "dllm_research.method:KEY_NORM"}
    install(tmp_path / "src", "dllm-research", {}, cache_methods=entry)
    monkeypatch.syspath_prepend(tmp_path / "src")
    for cached in ("_entries", "_members"):  # so that entry points are read anew
        monkeypatch.delitem(vars(CACHE_METHODS), cached, raising=False)
    params = DiffusionParams(gen_length=16, block_length=4, ignore_eos=True)
    prompts = [[5, 6, 7, 8, 9, 10], [11] * 30]

    def answers(method, **options):
        llm = engines(checkpoint_of(model), cache_method=method, cache_options=options)
        outputs = [output.outputs[0] for output in generate(llm, prompts, params)]
        assert_nothing_left(llm)
        return outputs

    everything = answers("key_norm", retention_ratio=1)
    dual = answers("dual")
    assert [each.token_ids for each in everything] == [each.token_ids for each in dual]
    short, long = answers("key_norm", retention_ratio=0.25)
    assert short.diffusion.refresh_states == ["update", *["reuse"] * 3] * 4
    assert long.diffusion.tokens_retained == (30 + 16 - 4) // 4


@pytest.fixture(scope="module")
def printed(environ, tmp_path_factory):
    """What each of the page's programs printed, in order."""
    folder, outputs = tmp_path_factory.mktemp("work"), []
    for file, language, text in BLOCKS:
        if file:
            continue
        program = folder / f"block.{language}"
        program.write_text(text, encoding="utf-8")
        command = ["bash", "-e"] if language == "bash" else ["python"]
        ran = subprocess.run(
            [*command, program],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, f"{text}\n{ran.stdout}\n{ran.stderr[-4000:]}"
        for line in re.findall(r"^ *print\(.*\)  # (.+)$", text, re.MULTILINE):
            assert line in ran.stdout, text
        outputs.append(ran.stdout)
        if "uv init" in text:
            write_files(folder / "dllm-research")
    return outputs


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_page_goes_from_nothing_to_rows_of_a_comparison(printed):
    _, models, figures, rows = printed
    words = " ".join(models.split())
    assert "key_norm (dllm-research) retention_ratio: float ≥ 0, ≤ 1; default" in words
    assert (
        "relative (dllm-research): float > 0, ≤ 1 with low_confidence, maskgit" in words
    )
    *_, unmasked, retained = figures.splitlines()
    assert max(map(int, re.findall(r"\d+", unmasked))) > 1
    # Half of what is outside the first block, in each layer.
    assert len(set(re.findall(r"\d+", retained))) == 1
    measured = re.findall(r"^(none|key_norm\S*) +(one|relative\S*) +demo", rows, re.M)
    methods = ("none", "key_norm:retention_ratio=0.5", "key_norm:retention_ratio=1")
    assert measured == list(itertools.product(methods, ("one", "relative=0.9")))


@pytest.mark.slow
def test_a_server_takes_the_method_and_the_option(printed, environ, tmp_path):
    """In processes that vLLM starts, and through the option's flag."""
    program = Path(environ["VIRTUAL_ENV"], "bin", "dllm")
    options = "--cache-method key_norm --max-model-len 512 --trace".split()
    server = Server(
        program,
        "serve",
        "demo",
        *options,
        "--relative",
        "0.5",
        log=tmp_path / "log",
        preloaded=False,
        environment=environ,
    )
    try:
        server.wait_until_ready()
        create = server.client().chat.completions.create
        prompt: Any = [{"role": "user", "content": "Reverse: Rome Tom Oslo"}]

        def figures(**options):
            options = {"vllm_xargs": {"block_length": 8, "trace": True, **options}}
            answer = create(
                model="demo", messages=prompt, max_tokens=32, extra_body=options
            )
            return answer.choices[0].model_extra["diffusion"]

        assert figures()["tokens_per_forward"] > 1
        assert figures(tokens_per_step=1)["tokens_per_forward"] == 1
        (first, *_) = figures(relative=0.01)["trace"]["retained_positions"]
        assert len(first) == 4, "layers"
        with pytest.raises(openai.BadRequestError, match="relative=2: Input should be"):
            figures(relative=2)
    finally:
        server.stop()


START = "from dllm_engine.decoding.unmasking_policies import UnmaskingRule\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "source", "message"),
    [
        ("unmasking_rules", "UnmaskingRule('noise', 'm:f', float)", "needs a meaning"),
        ("unmasking_rules", "UnmaskingRule('noise', 'm:f', 'x', 'y')", "is not a type"),
        (
            "unmasking_rules",
            "UnmaskingRule('probabilty', 'm:f', float, 'A share.')",
            "no unmasking policy measures 'probabilty'",
        ),
        ("unmasking_rules", "UnmaskingRules()", "cannot be imported: NameError: "),
        (
            "cache_methods",
            "UnmaskingRule('noise', 'm:f')",
            "not an instance of CacheMethod",
        ),
    ],
)
def test_a_command_ends_with_a_sentence(environ, tmp_path, group, source, message):
    """In a process of its own, because options are made when they are imported."""
    module = {"other": f"{START}X = {source}"}
    install(tmp_path, "dllm-other", module, **{group: {"x": "other:X"}})
    ran = subprocess.run(
        ["dllm", "models"],
        env=environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith(
        f"dllm: error: entry point 'x' (dllm.{group}) of the package dllm-other: "
    )
    assert message in ran.stderr
    assert ran.stderr.count("\n") == 1
