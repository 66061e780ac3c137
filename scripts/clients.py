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
import urllib.request
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[1] / "docs" / "clients.md"
TABLE = re.compile(r"(<!-- table -->\n).*?(<!-- end -->)", re.DOTALL)
TIMEOUT_S = 300


class Check(NamedTuple):
    """One call of a client."""

    package: str
    call: str
    code: str
    """Prints what was answered."""
    wanted: str
    """A part of what is printed."""

    @property
    def language(self) -> str:
        return "JavaScript" if "import {" in self.code else "Python"


PYTHON_HEAD = """\
import sys
URL = sys.argv[1]
CHAT = [{"role": "user", "content": "Reverse: Rome Tom Oslo"}]
BEFORE = "User: Tom=48. Ida=07. Max=31. Give: Tom, Ida, Max\\nBot: Tom=48,"
BEHIND = ", Max=31"
TEXT = "Tom lives in Paris. Ida lives in Rome. Ben lives in Oslo."
"""
JAVASCRIPT_HEAD = """\
const URL = process.argv[2];
const CHAT = [{role: "user", content: "Reverse: Rome Tom Oslo"}];
const BEFORE = "User: Tom=48. Ida=07. Max=31. Give: Tom, Ida, Max\\nBot: Tom=48,";
const BEHIND = ", Max=31";
"""
CHAT, FILLED = "Oslo Tom Rome", " Ida=07"

OPENAI = """
from openai import OpenAI
client = OpenAI(base_url=f"{URL}/v1", api_key="none")
"""
ANTHROPIC = """
from anthropic import Anthropic
client = Anthropic(base_url=URL, api_key="none")
asked = {"model": "demo", "max_tokens": 32, "messages": CHAT}
"""
LANGCHAIN = """
from langchain_openai import ChatOpenAI
client = ChatOpenAI(
    base_url=f"{URL}/v1", api_key="none", model="demo", max_tokens=32
)
"""
LITELLM = """
import litellm
asked = {"model": "hosted_vllm/demo", "api_base": f"{URL}/v1", "max_tokens": 32}
"""
MISTRAL = """
from mistralai.client import Mistral
client = Mistral(api_key="none", server_url=URL)
asked = {"model": "demo", "prompt": BEFORE, "suffix": BEHIND}
"""
OLLAMA = """
import ollama
client = ollama.Client(URL)
"""
AI_SDK = """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
const provider = createOpenAICompatible({name: "dllm", baseURL: `${URL}/v1`});
"""
CONTINUE = """
import { constructLlmApi } from "@continuedev/openai-adapters";
const signal = new AbortController().signal;
const asked = {model: "demo", prompt: BEFORE, suffix: BEHIND, stream: true};
let text = "";
const api = (provider) => constructLlmApi({
  provider, apiBase: `${URL}/v1/`, apiKey: "none"});
"""
CHECKS = (
    Check(
        "openai",
        "chat.completions.create",
        OPENAI
        + """
answer = client.chat.completions.create(model="demo", messages=CHAT, max_tokens=32)
print(answer.choices[0].message.content)
""",
        CHAT,
    ),
    Check(
        "openai",
        "chat.completions.create(stream=True)",
        OPENAI
        + """
chunks = client.chat.completions.create(
    model="demo", messages=CHAT, max_tokens=32, stream=True
)
print("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
""",
        CHAT,
    ),
    Check(
        "openai",
        "completions.create(suffix=…)",
        OPENAI
        + """
answer = client.completions.create(model="demo", prompt=BEFORE, suffix=BEHIND)
print(answer.choices[0].text)
""",
        FILLED,
    ),
    Check(
        "openai",
        "chat.completions.parse(response_format=…)",
        OPENAI
        + """
from typing import Literal
from pydantic import BaseModel
class Home(BaseModel):
    city: Literal["Paris", "Rome"]
answer = client.chat.completions.parse(
    model="demo", messages=CHAT, max_tokens=32, response_format=Home
)
print(type(answer.choices[0].message.parsed).__name__)
""",
        "Home",
    ),
    Check(
        "openai",
        "responses.create",
        OPENAI
        + """
answer = client.responses.create(
    model="demo", input=CHAT[0]["content"], max_output_tokens=32
)
print(answer.output_text)
""",
        CHAT,
    ),
    Check(
        "openai",
        "decisions.create",
        OPENAI
        + """
choices = [{"value": "Paris"}, {"value": "Rome"}]
question = {"instructions": "Where does Ida live?", "choices": choices}
answer = client.decisions.create(
    model="demo", input=TEXT, questions=[{"type": "choice", **question}]
)
print(answer.answers[0].choice)
""",
        "Rome",
    ),
    Check(
        "anthropic",
        "messages.create",
        ANTHROPIC + "print(client.messages.create(**asked).content[0].text)",
        CHAT,
    ),
    Check(
        "anthropic",
        "messages.stream",
        ANTHROPIC
        + """
with client.messages.stream(**asked) as stream:
    print("".join(stream.text_stream))
""",
        CHAT,
    ),
    Check(
        "typesafe-sdk",
        "system_one",
        """
from typesafe_sdk import Choice, TypeSafeClient
client = TypeSafeClient(base_url=URL, api_key="none")
question = Choice(
    instructions="Where does Ida live?", criteria={"Paris": None, "Rome": None}
)
answer = client.system_one(TEXT, {"home": question}).answers["home"]
print(max(answer.probabilities, key=answer.probabilities.get))
""",
        "Rome",
    ),
    Check(
        "langchain-openai",
        "ChatOpenAI.invoke",
        LANGCHAIN + "print(client.invoke(CHAT[0]['content']).content)",
        CHAT,
    ),
    Check(
        "langchain-openai",
        "ChatOpenAI.stream",
        LANGCHAIN
        + "print(''.join(c.content for c in client.stream(CHAT[0]['content'])))",
        CHAT,
    ),
    Check(
        "litellm",
        "completion",
        LITELLM
        + """
answer = litellm.completion(messages=CHAT, **asked)
print(answer.choices[0].message.content)
""",
        CHAT,
    ),
    Check(
        "litellm",
        "text_completion(suffix=…)",
        LITELLM
        + """
answer = litellm.text_completion(prompt=BEFORE, suffix=BEHIND, **asked)
print(answer.choices[0].text)
""",
        FILLED,
    ),
    Check(
        "mistralai",
        "fim.complete",
        MISTRAL + "print(client.fim.complete(**asked).choices[0].message.content)",
        FILLED,
    ),
    Check(
        "mistralai",
        "fim.stream",
        MISTRAL
        + """
events = client.fim.stream(**asked)
print("".join(event.data.choices[0].delta.content for event in events))
""",
        FILLED,
    ),
    Check(
        "ollama",
        "generate(suffix=…)",
        OLLAMA + "print(client.generate('demo', BEFORE, BEHIND).response)",
        FILLED,
    ),
    Check(
        "ollama",
        "generate(stream=True)",
        OLLAMA
        + """
parts = client.generate("demo", BEFORE, BEHIND, stream=True)
print("".join(part.response for part in parts))
""",
        FILLED,
    ),
    Check(
        "ollama",
        "list, show",
        OLLAMA
        + "print(client.list().models[0].model, client.show('demo').capabilities)",
        "insert",
    ),
    Check(
        "@ai-sdk/openai-compatible",
        "generateText",
        AI_SDK
        + """
const model = provider("demo");
console.log((await generateText({model, messages: CHAT, maxOutputTokens: 32})).text);
""",
        CHAT,
    ),
    Check(
        "@ai-sdk/openai-compatible",
        "streamText",
        AI_SDK
        + """
const model = provider("demo");
const {textStream} = streamText({model, messages: CHAT, maxOutputTokens: 32});
let text = "";
for await (const part of textStream) text += part;
console.log(text);
""",
        CHAT,
    ),
    Check(
        "@continuedev/openai-adapters",
        "openai: chatCompletionStream",
        CONTINUE
        + """
const body = {model: "demo", messages: CHAT, max_tokens: 32, stream: true};
for await (const chunk of api("openai").chatCompletionStream(body, signal))
  text += chunk.choices[0]?.delta.content ?? "";
console.log(text);
""",
        CHAT,
    ),
    Check(
        "@continuedev/openai-adapters",
        "mistral: fimStream",
        CONTINUE
        + """
for await (const chunk of api("mistral").fimStream(asked, signal))
  text += chunk.choices[0].delta.content;
console.log(text);
""",
        FILLED,
    ),
    Check(
        "@continuedev/openai-adapters",
        "inception: fimStream",
        CONTINUE
        + """
for await (const chunk of api("inception").fimStream(asked, signal))
  text += chunk.choices[0].delta.content;
console.log(text);
""",
        FILLED,
    ),
)


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
        file = self.folder / "check.mjs"
        if check.language == "JavaScript":
            file.write_text(JAVASCRIPT_HEAD + check.code, encoding="utf-8")
            command = ["node", str(file), url]
        else:
            code = PYTHON_HEAD + check.code
            command = [str(self.python), "-c", code, url]
        ran = self._run(command)
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
