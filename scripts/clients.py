"""Tries real clients against a server of the demo model, and writes the table of
``docs/clients.md``:

    dllm serve demo
    python scripts/clients.py --url http://localhost:8000 --folder /tmp/clients

Packages of Python and npm are installed into the folder, not beside this package.
"""

import argparse
import datetime
import json
import re
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import NamedTuple

CALLS = Path(__file__).with_suffix(".toml")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "clients.md"
TABLE = re.compile(r"(<!-- table -->\n).*?(<!-- end -->)", re.DOTALL)
TIMEOUT_S = 300


class Check(NamedTuple):
    """One call of a client."""

    package: str
    call: str
    language: str
    code: str
    """Prints what was answered."""
    wanted: str
    """A part of what is printed."""


def read_checks() -> list[Check]:
    """The calls of ``clients.toml``; packages of npm have names with an @."""
    content = tomllib.loads(CALLS.read_text(encoding="utf-8"))
    checks = []
    for package in content["packages"]:
        name = package["name"]
        language = "JavaScript" if name.startswith("@") else "Python"
        before = content["languages"][language] + package.get("code", "")
        checks += [
            Check(name, each["call"], language, before + each["code"], each["wanted"])
            for each in package["calls"]
        ]
    return checks


CHECKS = read_checks()


class Clients:
    """The packages, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"

    def install(self) -> None:
        packages = sorted({check.package for check in CHECKS})
        npm_packages = [name for name in packages if name.startswith("@")]
        python_packages = [name for name in packages if not name.startswith("@")]
        subprocess.run([sys.executable, "-m", "venv", self.folder], check=True)
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--upgrade"]
        subprocess.run([*pip, *python_packages], check=True)
        npm = ["npm", "install", "--silent", "--ignore-scripts", "--prefix"]
        subprocess.run([*npm, str(self.folder), *npm_packages, "ai"], check=True)

    def version(self, package: str) -> str:
        if package.startswith("@"):
            manifest = self.folder / "node_modules" / package / "package.json"
            return str(json.loads(manifest.read_text())["version"])
        code = f"from importlib.metadata import version; print(version({package!r}))"
        return self._run([str(self.python), "-c", code]).stdout.strip()

    def answer(self, check: Check, url: str) -> str:
        """Yes, or how the call failed."""
        program, ending = (
            ("node", "mjs") if check.language == "JavaScript" else (self.python, "py")
        )
        file = self.folder / f"check.{ending}"
        file.write_text(check.code, encoding="utf-8")
        ran = self._run([str(program), str(file), url])
        if ran.returncode == 0 and check.wanted in ran.stdout:
            return "yes"
        last = (ran.stderr or ran.stdout).strip().splitlines()[-1:]
        return f"no: {''.join(last)[:100]}"

    def _run(self, command: list[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=self.folder
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--installed", action="store_true", help="install nothing")
    args = parser.parse_args()
    clients = Clients(args.folder.resolve())
    if not args.installed:
        clients.install()
    with urllib.request.urlopen(f"{args.url}/version") as answer:
        vllm = json.load(answer)["version"]
    lines = [
        f"Tried on {datetime.date.today()} with vLLM {vllm}.",
        "",
        "| package | version | call | works |",
        "|---|---|---|---|",
    ]
    for check in CHECKS:
        answer = clients.answer(check, args.url)
        version = clients.version(check.package)
        line = f"| {check.package} | {version} | `{check.call}` | {answer} |"
        print(line, flush=True)
        lines.append(line)
    table = "\n".join(lines)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        TABLE.sub(lambda match: f"{match[1]}{table}\n{match[2]}", page),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
