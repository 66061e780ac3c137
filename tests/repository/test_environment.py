"""What a newcomer meets when the set-up cannot go on, and that it repeats nothing needlessly."""

import platform
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import environment
import pytest
from environment import (
    CHECKOUT,
    Environment,
    InstallError,
    SetupError,
    Step,
    advice,
    check_disk_space,
    check_machine,
    fingerprint,
    settings_for_uv,
)

DiskUsage = namedtuple("DiskUsage", "total used free")


def steps_that_log(log: list[str], fingerprints: dict[str, str], failing: str = "") -> list[Step]:
    """Steps that note their names instead of installing anything."""

    def run(name: str) -> None:
        log.append(name)
        if name == failing:
            raise SetupError("no")

    return [Step(name, name, mark, 0.0, lambda name=name: run(name)) for name, mark in fingerprints.items()]


@pytest.fixture
def made(tmp_path, monkeypatch) -> Environment:
    """An environment whose folder this program made."""
    monkeypatch.setattr(environment, "check_machine", lambda: None)
    made = Environment(tmp_path / "venv")
    made.directory.mkdir()
    made._write_record({})
    return made


def install(made: Environment, monkeypatch, fingerprints: dict[str, str], failing: str = "") -> list[str]:
    """Installs with the given steps and returns the names of those that ran."""
    log: list[str] = []
    monkeypatch.setattr(made, "_steps", lambda extras: steps_that_log(log, fingerprints, failing))
    if failing:
        with pytest.raises(SetupError):
            made.install()
    else:
        made.install()
    return log


def test_only_steps_that_changed_or_failed_run_again(made, monkeypatch, capsys):
    steps = {"a": "1", "b": "1", "c": "1"}
    assert install(made, monkeypatch, steps, failing="b") == ["a", "b"]
    assert install(made, monkeypatch, steps) == ["b", "c"]
    assert install(made, monkeypatch, steps) == []
    assert "up to date" in capsys.readouterr().out
    assert install(made, monkeypatch, steps | {"b": "2"}) == ["b"]


def test_extras_of_an_earlier_run_stay(made, monkeypatch):
    asked: list[list[str]] = []

    def steps(extras: list[str]) -> list[Step]:
        asked.append(list(extras))
        return steps_that_log([], {"project": ",".join(extras)})

    monkeypatch.setattr(made, "_steps", steps)
    for extras in ([], ["test", "ray"], [], ["eval"]):
        made.install(extras)
    assert asked == [[], ["ray", "test"], ["ray", "test"], ["eval", "ray", "test"]]


def test_a_change_makes_those_steps_run_again_that_read_it(tmp_path, monkeypatch):
    def changed(name, value):
        before, _ = fingerprints(), monkeypatch.setattr(environment, name, value)
        return {step for step, mark in fingerprints().items() if before[step] != mark}

    def fingerprints():
        return {step.name: step.fingerprint for step in Environment(tmp_path)._steps(["test"])}

    edited = tmp_path / "cpu.txt"
    edited.write_text(environment.NEEDS.read_text() + "another-package\n")
    assert changed("NEEDS", edited) == {"requirements", "check"}
    assert changed("UV", "0") == {*fingerprints()}
    assert fingerprint("ab", "c") != fingerprint("a", "bc")


def test_folder_made_by_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(SetupError, match="was not made by this program"):
        Environment(tmp_path).install()
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_full_disk_is_named_with_both_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: DiskUsage(100e9, 97.9e9, 2.1e9))
    with pytest.raises(SetupError, match=rf"{tmp_path} needs 4\.5 GB, and 2\.1 GB are free"):
        check_disk_space(tmp_path / "not" / "there" / "yet", 4.0)


@pytest.mark.parametrize(
    ("system", "machine", "libc", "message"),
    [
        ("Darwin", "arm64", ("", ""), "supports Linux on x86-64, and this is Darwin on arm64"),
        ("Linux", "aarch64", ("glibc", "2.36"), "this is Linux on aarch64"),
        ("Linux", "x86_64", ("", ""), "need glibc 2.28 or newer, and this is another C library"),
        ("Linux", "x86_64", ("glibc", "2.17"), "need glibc 2.28 or newer, and this is glibc 2.17"),
    ],
)
def test_unsuitable_machine_is_told_what_is_supported(monkeypatch, system, machine, libc, message):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    with pytest.raises(SetupError, match=message):
        check_machine()


def test_missing_system_library_is_named_with_its_package(monkeypatch):
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(environment.ctypes, "CDLL", missing)
    with pytest.raises(SetupError, match=r"libnuma\.so\.1.*libnuma1 on Debian"):
        check_machine()


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("cause: No space left on device (os error 28)", "The disk is full"),
        ("error: Request failed after 3 retries\n  cause: Failed to fetch: `https://x`", "Check the network"),
        ("No solution found\n  cause: Because x was not found in the package registry", "Check the network"),
        ("error: No solution found\n  cause: Because there is no version of x==2.0", "no such wheel"),
        ("error: something else", "goes on where it stopped"),
    ],
)
def test_advice_fits_what_was_said(output, expected):
    assert expected in advice(output)


def test_a_failed_installation_shows_the_end_of_its_output(made):
    with pytest.raises(InstallError, match=r"(?s)Invalid requirement.*setup\.log"):
        made._logged([sys.executable, "-m", "pip", "install", "--no-index", "not a requirement"], made.variables())


def test_uv_takes_from_pips_configuration_where_packages_come_from():
    printed = (
        "global.index-url='https://everyone'\nglobal.find-links='/a\\n/b c'\n:env:.index-url='https://me:secret@mine'\n"
        "install.extra-index-url='https://more file:///folder'\nfreeze.index-url='x'\nglobal.timeout='60'"
    )
    assert settings_for_uv(printed) == {
        "UV_DEFAULT_INDEX": "https://me:secret@mine",
        "UV_INDEX": "https://more file:///folder",
        "UV_FIND_LINKS": "/a,/b,c",
        "UV_HTTP_TIMEOUT": "60",
    }


def test_missing_cpu_build_of_torch_is_explained(made, monkeypatch):
    def uv(*arguments: str | Path) -> None:
        raise InstallError("", "No solution found\n  cause: Because there is no version of torch==2.13.0+cpu and")

    monkeypatch.setattr(made, "_uv", uv)
    with pytest.raises(SetupError, match="nothing was downloaded") as caught:
        made._install_torch()
    assert "PIP_EXTRA_INDEX_URL" in str(caught.value)


def test_older_python_gets_an_explanation(tmp_path):
    """The interpreter is this one, made to believe that it is older."""
    program = (
        "import platform, runpy, sys\n"
        "sys.version_info = (3, 8, 10, 'final', 0)\n"
        "platform.python_version = lambda: '3.8.10'\n"
        "sys.argv = ['scripts/dev.py', 'demo']\n"
        f"runpy.run_path({str(CHECKOUT / 'scripts' / 'dev.py')!r}, run_name='__main__')\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1
    assert "needs CPython 3.11, 3.12, 3.13 or 3.14, and this is CPython 3.8.10" in result.stderr
    assert "Traceback" not in result.stderr
