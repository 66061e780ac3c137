"""The command line as a whole: its arguments, and errors as one line."""

import argparse
import json
import subprocess
import sys
from importlib.metadata import packages_distributions, requires

import pytest
from pydantic import ValidationError

from dllm_engine.batch import BatchRequest
from dllm_engine.cache_methods import CACHE_METHODS
from dllm_engine.cli import evaluate, tune
from dllm_engine.cli.arguments import key_value, positive_int
from dllm_engine.cli.commands import COMMANDS, build_parser
from dllm_engine.cli.engine import DTYPES, json_object
from dllm_engine.cli.main import main
from dllm_engine.cli.models import describe
from dllm_engine.decoding.unmasking_policies import UNMASKING_POLICIES
from dllm_engine.demo import DEMO_MODELS, model_path
from dllm_engine.families import FAMILIES
from dllm_engine.request_options.unmasking import PARALLEL_OPTIONS
from dllm_engine.text import one_line
from tests.repository.test_imports import PROJECT, distribution_name

PLAN = "plan GSAI-ML/LLaDA-8B-Instruct"
SERVE = "serve demo --port 0"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate", "give either a PROMPT or --input FILE"),
        ("generate --input in.jsonl", "--input and --output go together"),
        ("serve /no/such/folder", "model folder /no/such/folder does not exist"),
        ("generate --input /no/such/file --output o", "/no/such/file: No such file"),
        (
            "eval --unmasking-rules one,two",
            "rule 'two' is unknown; give one, guided=MODEL or one of",
        ),
        (
            'eval --unmasking-rules slow_fast={"span_steps":2,"span_window":0}',
            "slow_fast option span_window=0",
        ),
        ("serve demo foo --trace", "'foo' is one argument too many"),
        (f"{SERVE} --cahce-method none", "did you mean '--cache-method'?"),
        (f"{SERVE} --max_modl_len=8", "did you mean '--max-model-len'?"),
        (f"{SERVE} --no-enforce-eagerly", "--no-enforce-eagerly is unknown"),
        (f"{SERVE} --kv-transfer-cfg.a.b 1", "--kv-transfer-cfg is unknown"),
        (f"{SERVE} --max-num-seqs many", "--max-num-seqs takes a number, not 'many'"),
        (f"{SERVE} --seed --headless", "--seed takes a number, not '--headless'"),
        (f"{SERVE} --max-num-seqs", "--max-num-seqs takes a number, not None"),
        (f"{SERVE} --guide-model /no/such", "folder /no/such does not exist"),
        (f"{SERVE} --lora-path nowhere", "lora_path='nowhere' does not exist"),
        ("generate --threshold 1.5 hi", "request option threshold=1.5"),
        (f"{SERVE} --cache-method magic", "unknown cache method"),
        (f"{SERVE} --threshold 1.5", "request default threshold=1.5"),
        (f"{SERVE} --block-length 0", "request default block_length=0"),
        (f"{SERVE} --cache-method sparse --retention-ratio 2", "retention_ratio=2"),
        (f'{SERVE} --additional-config={{"dllm":{{"x":1}}}}', "'x'=1"),
        (f'{SERVE} --additional-config={{"dllm":1}}', "must be a JSON object"),
        (
            f"{PLAN} --gpu-memory=80horses",
            "gpu_memory='80horses': could not interpret byte unit: horses",
        ),
        (f"{PLAN} --gpu-memory=24", "24 bytes; give the unit too, as in 24GiB"),
        (
            f"{PLAN} --gpu-memory=80GiB --gpu-memory-utilization=1.1",
            "gpu_memory_utilization=1.1: Input should be",
        ),
        ("bench --model llada-8b/3", "divided by one of"),
        (
            "bench --response 4 --block-length 8",
            "--block-length 8 is out of range: 1 … 4",
        ),
        ("bench --prompt 4000", "2048 positions"),
        ("eval --tasks nowhere.jsonl", "nowhere.jsonl: No such file or directory"),
        ("eval --lm-eval nothing.yaml", "knows no task 'nothing.yaml'"),
        ("eval --output table.txt", "give the file the ending .json"),
        ("eval --methods dual:refresh", "write its options as dual:NAME=VALUE"),
        (
            "eval --paper-table sparse-dllm/table-9",
            "table 'sparse-dllm/table-9' is unknown",
        ),
        (
            "eval --paper-table maskkv/table-6",
            "table-6 is not made by this command: it has only settings",
        ),
        (
            "tune some/model",
            "nothing says what some/model is to answer; give --tasks FILE",
        ),
        ("tune demo --loss -1", "--loss -1 is out of range"),
        ("tune demo --budget 0", "--budget 0 is out of range"),
        (
            "tune demo --unmasking-rules threshold=0.9+block_add_threshold=0.5",
            "as NAME=VALUE alone",
        ),
        ("tune demo --unmasking-rules slow_fast={}", "without slow_fast"),
        ("tune demo --output nowhere/tune.json", "there is no folder nowhere"),
        ("tune demo --tasks names,keys", "leave out keys"),
    ],
)
def test_errors_are_one_line_and_exit_status_2(
    line, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for command in (evaluate, tune):
        monkeypatch.setattr(command, "load", lambda arguments: pytest.fail("started"))
    monkeypatch.setattr(
        "vllm.entrypoints.cli.main.main", lambda: pytest.fail("started")
    )
    assert main(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("dllm: error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def commands():
    """The parser of each command by its name."""
    (chosen,) = (
        action
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return chosen.choices


def slips(name):
    """A name with a letter left out, and with two swapped."""
    middle = len(name) // 2
    before, behind = name[:middle], name[middle + 2 :]
    first, second = name[middle : middle + 2]
    return before + second + behind, before + second + first + behind


def refused(argv, capsys):
    """The one line with which a command line is refused."""
    with pytest.raises(SystemExit) as exit_status:
        build_parser().parse_args(argv)
    assert exit_status.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("dllm: error: ")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize("command", commands())
def test_every_name_with_a_slip_is_told_the_closest(capsys, command):
    assert "; did you mean '" in refused([slips(command)[0]], capsys)
    flags = commands()[command]._option_string_actions
    word = "bash" if command == "completion" else "demo"
    for flag, action in flags.items():
        for choice in (
            choice for choice in map(str, action.choices or ()) if len(choice) >= 4
        ):
            error = refused([command, "demo", flag, f"{choice}x"], capsys)
            assert f"is unknown; did you mean '{choice}'? Choose one of " in error
        if len(flag) > 4 and command not in (
            "serve",
            "lm-eval",
        ):  # which pass on what they do not know
            for slip in (f"{flag}x", *slips(flag)):
                if not any(
                    known.startswith(slip) for known in flags
                ):  # as an abbreviation
                    assert f"{slip} is unknown; did you mean '--" in refused(
                        [command, slip, word], capsys
                    )


def test_traceback_is_shown_on_request(monkeypatch):
    argv = "eval --tasks poems".split()
    with pytest.raises(ValueError, match="poems"):
        main(["--traceback", *argv])
    monkeypatch.setenv("DLLM_TRACEBACK", "1")
    with pytest.raises(ValueError, match="poems"):
        main(argv)
    monkeypatch.setenv("DLLM_TRACEBACK", "0")
    assert main(argv) == 2


WORKS_WITHOUT_VLLM = ["models", "plan demo", "completion zsh"]
NEEDS_VLLM = [
    "generate hi",
    "chat",
    "serve demo --port 0",
    "eval",
    "lm-eval --tasks names",
    "tune demo",
    "calibrate demo --questions a",
    "bench",
    "check",
]


def test_without_vllm_a_command_does_its_work_or_says_what_is_missing():
    """In a process where only those modules can be imported that an installation of
    this package alone has.
    """
    modules = {
        module: {*map(distribution_name, names)}
        for module, names in packages_distributions().items()
    }
    installed = set().union(*modules.values())
    needed, needs = {"dllm-engine"}, list(PROJECT["dependencies"])
    while needs:
        name = distribution_name(need := needs.pop())
        if name in installed - needed and "extra ==" not in need:
            needed.add(name)
            needs += requires(name) or ()
    missing = [module for module, names in modules.items() if not names & needed]
    lines = [line.split() for line in WORKS_WITHOUT_VLLM + NEEDS_VLLM]
    run = (
        "import sys; from dllm_engine.cli.main import main\n"
        f"sys.modules.update(dict.fromkeys({missing!r}))\n"
        f"print([main(line) for line in {lines}])"
    )
    ran = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True)
    statuses = [0] * len(WORKS_WITHOUT_VLLM) + [2] * len(NEEDS_VLLM)
    assert ran.stdout.endswith(f"{statuses}\n"), ran.stderr
    said = ran.stderr.splitlines()
    assert len(said) == len(NEEDS_VLLM)
    assert all("vLLM is not installed; in a checkout, run" in line for line in said)


def test_the_command_alone_prints_its_help(capsys):
    assert main([]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("usage: dllm ")
    assert printed.err == ""


@pytest.mark.parametrize(
    "line",
    [
        "--help",
        "models",
        "plan fast-dllm-v2-7b",
        "plan demo",
        "generate --nothing",
        "generate --threshold 2 hi",
        "serve demo --max-modl-len 8",
        "serve demo --threshold 2",
        "lm-eval --modl dllm",
    ],
)
def test_what_needs_no_engine_loads_neither_vllm_nor_torch(line):
    check = (
        "import sys; from contextlib import suppress;"
        "from dllm_engine.cli.main import main\n"
        f"with suppress(SystemExit): main({line.split()!r})\n"
        "sys.exit(not {'vllm', 'torch', 'transformers'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def completed(script, *words):
    """What the script for bash offers for the last of ``words``."""
    ask = f"{script}\nCOMP_WORDS=({' '.join(words)!s} '')\nCOMP_CWORD={len(words)}\n"
    run = [ask + '_dllm; echo "${COMPREPLY[@]}"']
    done = subprocess.run(
        ["bash", "--norc", "-c", *run], capture_output=True, text=True
    )
    return done.stdout.split()


def test_a_shell_completes_commands_options_and_values(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert {*COMMANDS, "demo-path"} <= {*completed(script, "dllm")}
    assert "--cache-method" in completed(script, "dllm", "generate")
    assert completed(script, "dllm", "generate", "--dtype") == [*DTYPES]
    assert {*DEMO_MODELS} <= {*completed(script, "dllm", "demo-path")}
    assert {*DEMO_MODELS} <= {*completed(script, "dllm", "serve")}
    assert completed(script, "dllm", "serve", "--cache-method") == [*CACHE_METHODS]
    for shell in ("zsh", "fish"):
        assert main(["completion", shell]) == 0
        assert "cache-method" in capsys.readouterr().out


def test_demo_path_is_printed_alone(capsys):
    for name, folder in {
        (): "demo",
        ("demo",): "demo",
        ("demo-blocks",): "demo-blocks",
    }.items():
        assert main(["demo-path", *name]) == 0
        assert capsys.readouterr().out == f"{model_path(folder)}\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5", 0.5),
        ("[0, 1]", [0, 1]),
        ("true", True),
        ("random", "random"),
        ("a=b", "a=b"),
        ("", ""),
        ("7", 7),
        ("8k", 8000),
        ("8K", 8192),
        ("25.6k", 25600),
        ("1.5K", 1536),
        ("2m", 2_000_000),
        ("8kk", "8kk"),
    ],
)
def test_option_values_are_json_or_numbers_as_vllm_takes_them_or_text(text, value):
    assert key_value(f"name={text}") == ("name", value)
    if isinstance(value, int) and not isinstance(value, bool):
        assert positive_int(text) == value


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (positive_int, text)
        for text in ("0", "-1", "two", "1.5", "", "1.0001k", "8kk", "k")
    ]
    + [(key_value, text) for text in ("ratio", "=0.5", "")]
    + [(json_object, text) for text in ("{", "[1]")],
)
def test_what_is_no_count_no_option_or_no_object_is_refused(read, text):
    with pytest.raises(argparse.ArgumentTypeError):
        read(text)


def test_errors_are_one_line_and_name_their_type_if_no_user_was_meant_to_see_them():
    with pytest.raises(ValidationError) as caught:
        BatchRequest.model_validate({"prompt": 1})
    assert one_line(caught.value) == "prompt: Input should be a valid string", (
        "without pydantic's additions"
    )
    assert one_line(KeyError("role")).startswith("KeyError: 'role' ")
    assert one_line(RuntimeError()).startswith("RuntimeError:")
    assert one_line(ValueError("two\n  lines")) == "two lines"


# `dllm models` lists what the registries hold


def test_the_list_names_everything_and_json_holds_the_same(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) in range(66, 73)
    assert "float > 0, ≤ 1" in printed
    words = printed.replace(": ", " ").split()
    assert "FULL steps of a window before the UPDATE step" in " ".join(words), (
        "what an option means"
    )
    checkpoints = [
        checkpoint for family in FAMILIES.values() for checkpoint in family.checkpoints
    ]
    options = [
        option
        for method in CACHE_METHODS.values()
        for option in method.options.model_fields
    ]
    assert {
        *checkpoints,
        *CACHE_METHODS,
        *options,
        *UNMASKING_POLICIES,
        *PARALLEL_OPTIONS,
    } <= set(words)
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(describe()))
