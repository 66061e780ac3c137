"""Every entry point once as a process of its own, on the demo model."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[2]
DLLM = [sys.executable, "-m", "dllm_engine.cli.main"]
PROMPT = "Tom=48. Ida=07. Max=31. Give: Ida, Tom"
ANSWER = "Ida=07, Tom=48"
TIMEOUT = 300


@pytest.fixture
def environment(tmp_path):
    """As a newcomer's: nothing set that this session's own engines need."""
    return {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}


@pytest.fixture
def run(environment, tmp_path):
    def start(*command):
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )

    return start


def test_generate_prints_the_answer_and_nothing_else(run):
    result = run(*DLLM, "generate", PROMPT)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{ANSWER}\n"
    assert result.stderr == ""


def test_a_killed_run_is_resumed_to_one_record_per_line(run, environment, tmp_path):
    prompts = [json.dumps({"prompt": PROMPT, "id": i}) for i in range(60)]
    (tmp_path / "in.jsonl").write_text("\n".join([*prompts, "not JSON"]) + "\n")
    output = tmp_path / "out.jsonl"
    # A request at a time, through all of its blocks: enough time to be killed in between.
    command = [*DLLM, "generate", "--input", "in.jsonl", "--output", "out.jsonl", "--ignore-eos"]
    command += ["--engine-arg", "max_num_seqs=1"]

    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 5, process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    kept = output.read_bytes().splitlines(keepends=True)
    assert 5 <= len(kept) < 61
    with output.open("ab") as file:  # the kill may have come amid a line as well
        file.write(kept[0][:-10])

    result = run(*command)
    assert result.returncode == 1, result.stderr
    assert "errors: 1" in result.stderr
    lines = output.read_bytes().splitlines(keepends=True)
    assert lines[: len(kept)] == kept
    records = [json.loads(line) for line in lines]
    assert sorted(record["index"] for record in records) == list(range(61))
    answers = [record for record in records if "error" not in record]
    assert [record["id"] for record in answers] == [record["index"] for record in answers]
    assert {tuple(record["token_ids"]) for record in answers} == {tuple(answers[0]["token_ids"])}


def test_ctrl_c_while_loading_is_one_line_and_leaves_no_process(environment, tmp_path):
    """A process, since Python raises Ctrl-C in its main thread alone; two ranks, for the engine's own processes."""
    log = tmp_path / "stderr"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*DLLM, "generate", PROMPT, "--tensor-parallel-size", "2"],
            cwd=tmp_path,
            env=environment | {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        wait_until(lambda: b"Initializing a V1 LLM engine" in log.read_bytes(), process)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        output, _ = process.communicate(timeout=TIMEOUT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail("processes of the engine are left")
    assert process.returncode == 130
    assert output == b""
    assert log.read_text().count("dllm: interrupted\n") == 1


def test_eval_prints_a_row_per_task(run, tmp_path):
    result = run(*DLLM, "eval", "--count", "2", "--tasks", "names,chat", "--json", "report.json")
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["TASK", "names", "chat"]
    assert len(json.loads((tmp_path / "report.json").read_text())["scores"]) == 2


def test_bench_measures_two_models_draws_and_compares(run, tmp_path):
    pytest.importorskip("matplotlib")
    small = ["--methods", "none,sparse", "--batch", "2", "--response", "16", "--repeats", "1", "--count", "2"]
    result = run(*DLLM, "bench", "--quick", *small)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    for about in ("demo (checkpoint weights", "llada-8b/16 (random weights"):
        assert any(line.startswith(about) for line in lines)
    assert sum(line.startswith(("plain ", "none ", "sparse ")) for line in lines) == 3 * 3
    report = json.loads((tmp_path / "bench.json").read_text())
    for cell in (cell for model in report["runs"] for cell in model["cells"] if cell["method"] != "plain"):
        assert cell["tokens_per_second"] > 0
        assert cell["whole"]["floor_seconds"] > 0
    plots = sorted(file.name for file in (tmp_path / "bench-plots").iterdir())
    assert plots == ["bench-demo.png", "bench-llada-8b-16.png"]
    compared = run(*DLLM, "bench", "--compare", "bench.json", "bench.json")
    assert compared.returncode == 0, compared.stderr
    assert "Note" not in compared.stdout
    assert compared.stderr == ""


def test_methods_measured_one_by_one_each_have_a_baseline(run, tmp_path):
    """More engines than the memory holds side by side; here it is said to be short."""
    program = (
        "import sys; from dllm_engine.bench import benchmark; benchmark.available = lambda: 0; "
        "from dllm_engine.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    what = ["--methods", "none,dual", "--batch", "1", "--prompt", "32", "--response", "8", "--repeats", "1"]
    result = run(sys.executable, "-c", program, "bench", *what, "--output", "result.json")
    assert result.returncode == 0, result.stderr
    (measured,) = json.loads((tmp_path / "result.json").read_text())["runs"]
    assert measured["groups"] == [["none"], ["dual"]]
    cells = [(cell["method"], cell["group"]) for cell in measured["cells"]]
    assert cells == [("plain", 0), ("none", 0), ("plain", 1), ("dual", 1)]


def test_a_model_that_does_not_exist_is_one_line(run):
    result = run(*DLLM, "generate", "Hello!", "--model", ".")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("dllm: error: ")
    assert result.stderr.count("\n") == 1


def test_inspect_writes_a_page_and_says_so(run, tmp_path):
    command = [*DLLM, "inspect", PROMPT, "--cache-option", "retention_ratio=0.5", "--output", "sparse.html"]
    result = run(*command)
    assert result.returncode == 0, result.stderr
    written, cache, cost = result.stdout.splitlines()
    assert written == "wrote sparse.html"
    assert cache.startswith("sparse (retention_ratio=0.5, ")
    assert "denoising steps computed" in cost
    page = (tmp_path / "sparse.html").read_text(encoding="utf-8")
    assert page.endswith("</html>\n")
    assert "Ida" in page


def test_sparse_example_compares_the_caches(run):
    result = run(sys.executable, CHECKOUT / "examples" / "offline_sparse.py")
    assert result.returncode == 0, result.stderr
    table = {line[:16].strip(): line[16:].split() for line in result.stdout.splitlines()[-4:]}
    computed_sparse, computed_none = (int(cell.replace(",", "")) for cell in table["tokens computed"])
    assert computed_sparse < computed_none
    assert int(table["pages held"][0]) > 0
    assert table["pages held"][1] == "0"


@pytest.mark.parametrize("name", ["offline_generate.py", "plain_vllm.py"])
def test_example_answers(run, name):
    result = run(sys.executable, CHECKOUT / "examples" / name)
    assert result.returncode == 0, result.stderr
    assert ANSWER in result.stdout


def test_lm_eval_command_runs_the_model_by_its_name(run, tmp_path):
    task = (CHECKOUT / "examples" / "lm_eval" / "names.yaml").read_text(encoding="utf-8")
    (tmp_path / "names.yaml").write_text(task.replace("examples/", f"{CHECKOUT}/examples/"), encoding="utf-8")
    model = "pretrained=demo,cache_method=dual,max_num_seqs=4,block_length=8"
    result = run(
        *DLLM, "lm-eval", "--model", "dllm", "--model_args", model, "--tasks", str(tmp_path / "names.yaml"),
        "--apply_chat_template", "--limit", "6", "--output_path", str(tmp_path / "out"),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (report,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(report.read_text(encoding="utf-8"))
    assert results["results"]["names"]["exact_match,stripped"] == 1.0
    assert results["config"]["model"] == "dllm"
    assert "|names|" in result.stdout


def test_a_paper_task_without_its_data_says_what_is_missing(run, environment, tmp_path):
    environment |= {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    result = run(*DLLM, "eval", "--paper-task", "gsm8k")
    assert result.returncode == 2
    (message,) = (line for line in result.stderr.splitlines() if line.startswith("dllm: error: "))
    assert "task 'gsm8k' cannot be loaded" in message
    assert "openai/gsm8k" in message
    assert "HF_HOME" in message


def test_serve_answers_under_the_name_demo(environment, tmp_path):
    port = free_port()
    command = [*DLLM, "serve", "demo", "--port", str(port), "--trace"]
    log = tmp_path / "server.log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=stream, stderr=stream)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), process)
        # The checkpoint's own length and block length.
        request = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}]}
        for options in ({}, {"trace": True}):
            response = post(f"http://127.0.0.1:{port}/v1/chat/completions", request | {"vllm_xargs": options})
            assert response["choices"][0]["message"]["content"].strip() == ANSWER
            assert ("trace" in response["choices"][0]["diffusion"]) is bool(options)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        return json.load(response)


def wait_until(condition, process):
    """Until ``condition`` holds; fails as soon as ``process`` has ended."""
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None, f"ended with status {process.returncode}"
        assert time.monotonic() < end, "still not there"
        time.sleep(0.05)
