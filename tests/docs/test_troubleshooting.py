"""Messages that docs/troubleshooting.md quotes are those that the programs print, and
alert rules name its sections and metrics that exist.
"""

import ast
import re
from pathlib import Path

import pytest
import vllm
import yaml

from dllm_engine.vllm_hooks.metrics import METRICS, PREFIX
from dllm_engine.vllm_hooks.server.open_requests import HTTP_ERRORS
from tests.support.checkout import CHECKOUT, DOCS

PAGE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = sorted(
    {each for each in re.findall(r"`([^`]+)`", PAGE) if each.count(" ") > 2}
)
assert len(QUOTED) > 20
RULES = yaml.safe_load((DOCS / "grafana" / "alerts.yaml").read_text())
(GROUP,) = RULES["groups"]


def texts_of(path: Path) -> list[str]:
    """Texts in a Python file, with … for what is filled in."""
    texts = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = [
                str(part.value) if isinstance(part, ast.Constant) else "…"
                for part in node.values
            ]
            texts.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(re.sub(r"%[sdr]", "…", node.value))
    return texts


@pytest.fixture(scope="module")
def printed() -> list[str]:
    texts = [(CHECKOUT / "dllm_engine/playground/page.html").read_text()]
    for folder in ("dllm_engine", "scheduler", "model_executor", "kernels"):
        for path in (CHECKOUT / folder).rglob("*.py"):
            texts += texts_of(path)
    return texts


@pytest.mark.parametrize("message", sorted(QUOTED))
def test_messages_are_those_of_the_sources(printed, message):
    pattern = ".*".join(map(re.escape, message.split("…")))
    assert message.startswith("pip ") or any(
        re.search(pattern, text, re.DOTALL) for text in printed
    )


@pytest.mark.parametrize("rule", GROUP["rules"], ids=lambda rule: rule["alert"])
def test_alerts_lead_to_sections_of_the_page(rule):
    headings = re.findall("^## (.*)$", PAGE, re.MULTILINE)
    anchors = [re.sub("[^a-z0-9 -]", "", each.lower()) for each in headings]
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert page == "troubleshooting.md"
    assert anchor in [each.replace(" ", "-") for each in anchors]
    assert rule["labels"]["severity"] in ("warning", "critical")


def test_alerts_ask_for_metrics_that_exist():
    folder = Path(vllm.__file__).parent / "v1" / "metrics"
    of_vllm = (folder / "loggers.py").read_text()
    ours = {PREFIX[spec.of_vllm] + name for name, spec in METRICS.items()}
    # Counted where a request is answered, by vLLM and by us.
    (errors,) = HTTP_ERRORS.collect()
    ours |= {"http_requests", errors.name}
    begun = [sample.labels.get("status") for sample in errors.samples]
    assert {"400", "500", "503"} <= {*begun}  # else their first answers raise no alarm
    for rule in GROUP["rules"]:
        asked = re.findall(r"\b(?:vllm:|http_|dllm_http)\w+", rule["expr"])
        assert asked
        for name in asked:
            known = name in ours or name.removesuffix("_total") in ours
            assert known or f'"{name}"' in of_vllm
