"""Every snippet of README and docs runs as printed, as a file, in the environment that
README tells the reader to make.

The blocks of a page run one after the other in one folder. A block that starts a server
stays in the background for those after it. A new block runs, or has to be listed below
with a reason.
"""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from dataclasses import dataclass

import pytest
from vllm.utils.network_utils import get_open_port

from tests.support.checkout import CHECKOUT
from tests.support.preloaded import preloaded_programs, wait_until
from tests.support.server import is_healthy

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(
        f"docs/{page.name}"
        for page in CHECKOUT.glob("docs/*.md")
        if page.name != "research.md"
    ),
]
"""``docs/research.md`` writes and installs a package: see ``test_research.py``."""
# Languages of programs; other blocks show output or data.
PROGRAMS = ("bash", "python")
PORT = 8000
"""Of the pages; a snippet runs with a free one in its place."""

NEEDS_CHECKPOINT = "needs a released checkpoint"
NEEDS_NETWORK = "installs from the network"
TAKES_MINUTES = "takes minutes; tests/cli runs the command on less"
# First line of a block: why it is not run.
NOT_RUN = {
    "python3 scripts/dev.py test": "is this run",
    'pip install ".[cuda]"': "needs a GPU and the network",
    "dllm eval --lm-eval examples/lm_eval/names.yaml": TAKES_MINUTES,
    "dllm eval --count 20 --methods none,": TAKES_MINUTES,
    "dllm eval --model demo-blocks --count 100": TAKES_MINUTES,
    "dllm eval --tasks decisions,decisions-json": TAKES_MINUTES,
    "dllm calibrate MODEL": "needs many questions; a test runs it on some",
    "dllm eval --paper-table": NEEDS_CHECKPOINT,
    "dllm serve GSAI-ML/LLaDA-8B-Instruct --quantization": NEEDS_CHECKPOINT,
    "python examples/quantize.py": TAKES_MINUTES,
    "dllm eval --methods all --unmasking-rules one,threshold=0.9": TAKES_MINUTES,
    "dllm chat --model GSAI-ML/LLaDA-8B-Instruct": NEEDS_CHECKPOINT,
    "dllm generate --model dllm-hub/": NEEDS_CHECKPOINT,
    "dllm tune GSAI-ML/LLaDA-8B-Instruct": NEEDS_CHECKPOINT,
    "dllm serve GSAI-ML/LLaDA-8B-Instruct --lora-path": NEEDS_CHECKPOINT,
    "$ dllm plan GSAI-ML/LLaDA-8B-Instruct": (
        "tests/docs/test_deploy_docs.py compares all of its output"
    ),
    'pip install ".[ray]"': NEEDS_CHECKPOINT,
    "pip install '.[eval]'": NEEDS_NETWORK,
    "dllm eval --model GSAI-ML/LLaDA-8B-Instruct --paper-task": NEEDS_CHECKPOINT,
    "dllm eval --model GSAI-ML/LLaDA-8B-Instruct --tasks intents": NEEDS_CHECKPOINT,
    "dllm bench --model llada-8b": "needs a GPU",
    "dllm check --output check.json": (
        "tests/cli/test_check.py runs it in its own process, where engines start faster"
    ),
    'pip install ".[cuda,test]"': "needs a GPU and the network",
    "python3 scripts/gpu_bundle.py gpu-bundle": "needs a GPU and the network",
}
# First line of a block: what it prints.
PRINTS = {
    "python3 scripts/dev.py demo": "Ida=07, Tom=48",
    "source .venv/bin/activate": "Oslo Tom Rome",
    "curl -s localhost:8000/v1/chat/completions": '"content":" Oslo Tom Rome"',
    "import openai": "Oslo Tom Rome",
    "dllm lm-eval --model dllm": "|names|",
    "curl -s localhost:8000/v1/systemone": '"choice":"Rome"',
    "curl -s localhost:8000/v1/decisions": '"values":{"code":"07"}',
}


@dataclass(frozen=True)
class Snippet:
    page: str
    language: str
    text: str

    @property
    def first_line(self) -> str:
        return self.text.splitlines()[0]

    @property
    def is_program(self) -> bool:
        return self.language in PROGRAMS or self.first_line.startswith("$ ")

    @property
    def is_server(self) -> bool:
        return self.first_line.startswith(("vllm serve ", "dllm serve "))

    def on_port(self, port: int) -> str:
        """The text with a server on this port instead of the pages'."""
        text = self.text.replace(f"localhost:{PORT}", f"localhost:{port}").replace(
            f"--port {PORT}", f"--port {port}"
        )
        if not self.is_server or "--port" in text:
            return text
        return re.sub(r'^(\w+ serve (?:"[^"]*"|\S+))', rf"\1 --port {port}", text)

    def of(self, table: dict[str, str]) -> str | None:
        """The value of the entry that the first line begins with."""
        return next(
            (
                value
                for start, value in table.items()
                if self.first_line.startswith(start)
            ),
            None,
        )


def snippets(page: str) -> list[Snippet]:
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [Snippet(page, language, body) for language, body in blocks]


ALL = [snippet for page in PAGES for snippet in snippets(page)]


def to_run(page: str) -> list[Snippet]:
    """Blocks of a page that are run; one that several pages print runs where it comes
    first, but a server on each.
    """
    first = {snippet.text: snippet for snippet in reversed(ALL)}
    return [
        snippet
        for snippet in snippets(page)
        if snippet.is_program
        and snippet.of(NOT_RUN) is None
        and (snippet.is_server or first[snippet.text] == snippet)
    ]


def test_each_block_that_is_not_run_is_there_and_each_block_is_closed():
    programs = [snippet for snippet in ALL if snippet.is_program]
    for start in [*NOT_RUN, *PRINTS]:
        assert any(snippet.first_line.startswith(start) for snippet in programs), start
    for page in PAGES:
        fences = re.findall(
            r"^\s*```",
            (CHECKOUT / page).read_text(encoding="utf-8"),
            flags=re.MULTILINE,
        )
        assert len(fences) == 2 * len(snippets(page)), page
    assert {snippet.language for snippet in ALL} <= {
        *PROGRAMS,
        "",
        "json",
        "mermaid",
        "yaml",
    }
    assert not [
        snippet
        for snippet in ALL
        if snippet.language == "python" and snippet.of(NOT_RUN) is not None
    ]


@pytest.fixture
def folder(tmp_path):
    """What the pages speak of, and the environment where README has it made."""
    for name in ("examples", "scripts"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


@pytest.fixture
def environ(folder):
    """The variables of a shell after `source .venv/bin/activate`, without those that
    the tests' own engines need.
    """
    variables = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("VLLM_", "PYTEST_"))
    }
    # The set-up script would make `.venv` in the checkout.
    variables["DLLM_VENV"] = sys.prefix
    command = ["bash", "-c", "source .venv/bin/activate && env -0"]
    printed = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, check=True
    )
    variables = dict(
        entry.split("=", 1) for entry in printed.stdout.decode().split("\0") if entry
    )
    # Blocks that activate the environment themselves put its own programs in front
    # again.
    return variables | {"PATH": f"{preloaded_programs()}:{variables['PATH']}"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page)])
def test_snippets_of_a_page(folder, environ, page):
    server: subprocess.Popen[bytes] | None = None
    port = get_open_port()
    try:
        for number, snippet in enumerate(to_run(page)):
            file = (
                folder
                / f"snippet{number}.{'py' if snippet.language == 'python' else 'sh'}"
            )
            text = snippet.on_port(port)
            file.write_text(text, encoding="utf-8")
            command = (
                ["python", file]
                if snippet.language == "python"
                else ["bash", "-e", file]
            )
            if snippet.is_server:
                stop(server)
                log = folder / "server.log"
                with log.open("wb") as stream:
                    output = {"stdout": stream, "stderr": subprocess.STDOUT}
                    server = subprocess.Popen(
                        command,
                        cwd=folder,
                        env=environ,
                        start_new_session=True,
                        **output,
                    )
                wait_until(
                    lambda: is_healthy(f"http://localhost:{port}"), 300, server, log
                )
                if "dllm serve" in text and "VLLM_LOGGING_LEVEL" not in environ:
                    assert len(log.read_text(encoding="utf-8").splitlines()) <= 10
                for url in re.findall(r"http://localhost\S+", text):
                    assert urllib.request.urlopen(url, timeout=30).status == 200
                continue
            ran = subprocess.run(
                command,
                cwd=folder,
                env=environ,
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert ran.returncode == 0, (
                f"{snippet.text}\n{ran.stdout[-3000:]}\n{ran.stderr[-6000:]}"
            )
            if snippet.language == "python":
                assert not ran.stderr, f"{snippet.text}\n{ran.stderr[-6000:]}"
            expected = [line for line in [snippet.of(PRINTS)] if line]
            expected += re.findall(
                r"^ *print\(.*\)  # (.+)$", snippet.text, flags=re.MULTILINE
            )
            for line in expected:
                assert line in ran.stdout, snippet.text
    finally:
        stop(server)


def stop(process: "subprocess.Popen[bytes] | None") -> None:
    """Ctrl-C, as the reader presses it: it reaches the shell and the server."""
    if process is None or process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
