"""A real server in a process of its own."""

import functools
import os
import signal
import subprocess
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
from prometheus_client.parser import text_string_to_metric_families
from vllm.utils.network_utils import get_open_port

from tests.support.preloaded import Program, wait_until

START_TIMEOUT_S = 600
DEMO_SERVER = (
    "serve",
    "demo",
    "--dtype",
    "float32",
    "--max-model-len",
    "512",
    "--max-num-seqs",
    "12",
    "--cache-method",
    "sparse",
    "--page-size",
    "8",
)
"""Arguments of a server with a cache."""


class Server:
    """``program`` (``dllm`` or ``vllm``, installed beside this Python) until ``stop``,
    in a session of its own. ``preloaded``: in a process that has imported vLLM, with an
    engine that is forked; otherwise as users start it."""

    def __init__(
        self,
        program: str | Path,
        *arguments: str,
        log: Path,
        logging_level: str = "WARNING",
        preloaded: bool = True,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.port = get_open_port()
        self.log = log
        # The tests' own engines run in one process.
        variables: dict[str, Any] = {
            "VLLM_LOGGING_LEVEL": logging_level,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }
        command = [
            str(Path(sys.executable).parent / program),
            *arguments,
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        # The tests' own engines are quiet, which their processes would be as well.
        inherited = {
            name: value for name, value in environment.items() if name != "DLLM_QUIET"
        }
        start = (
            Program
            if preloaded
            else functools.partial(subprocess.Popen, start_new_session=True)
        )
        with log.open("wb") as stream:
            self.process = start(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**inherited, **variables},
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0)

    def chat(self, prompt: str, model: str = "demo", **asked: Any) -> Any:
        """What one of ``demo_answers`` is by HTTP."""
        messages: Any = [{"role": "user", "content": prompt}]
        body = {"vllm_xargs": {"block_length": 8}}
        create = self.client().chat.completions.create
        return create(
            model=model, messages=messages, max_tokens=32, extra_body=body, **asked
        )

    def wait_until_ready(self) -> None:
        wait_until(
            lambda: is_healthy(self.url), START_TIMEOUT_S, self.process, self.log
        )

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def stop(self) -> int:
        """SIGTERM, as a supervisor sends; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                raise
        return self.process.wait()


class ServerFactory:
    """Starts servers, one per program and settings. They live until the end of the
    session and then stop in order.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._servers: dict[str, Server] = {}

    def __call__(self, program: str, *arguments: str, **options: Any) -> Server:
        key = repr((program, arguments, options))
        if key not in self._servers:
            log = self.folder / f"server{len(self._servers)}.log"
            self._servers[key] = Server(program, *arguments, log=log, **options)
        self._servers[key].wait_until_ready()
        return self._servers[key]

    def shutdown(self) -> None:
        statuses = {server.log: server.stop() for server in self._servers.values()}
        assert not any(statuses.values()), statuses


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5):
            return True
    except OSError:
        return False


def scrape(url: str) -> dict[str, float]:
    """Every series of ``/metrics``, summed over its labels."""
    return series_of(
        urllib.request.urlopen(url + "/metrics", timeout=120).read().decode()
    )


def series_of(text: str) -> dict[str, float]:
    """Every series of a text of metrics, summed over its labels."""
    values: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] += sample.value
    return dict(values)
