"""The playground's page and its route in vLLM's server, without a browser and without
an engine.
"""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from dllm_engine import playground
from dllm_engine.cli.commands import build_parser
from dllm_engine.cli.serve import merged_config
from dllm_engine.families import LLADA, SDAR
from dllm_engine.options import EngineOptions
from tests.support.http_app import app_client

SPARSE = {"cache_method": "sparse"}


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        (LLADA, {}, {}),
        (
            LLADA,
            SPARSE | {"trace": True},
            {"data-retention-ratio": "0.5", "data-trace": "true"},
        ),
        (
            LLADA,
            SPARSE | {"cache_options": {"retention_ratio": 0.3}},
            {"data-retention-ratio": "0.3"},
        ),
        (LLADA, SPARSE | {"cache_options": "paper"}, {"data-retention-ratio": "0.5"}),
        (SDAR, {}, {"data-by-blocks": "true"}),
    ],
)
def test_the_page_knows_what_the_engine_allows(family, options, expected):
    client = app_client(
        "--additional-config", json.dumps({"dllm": options}), family=family
    )
    tag = re.search("<html[^>]*>", client.get("/playground").text)[0]
    assert dict(re.findall(r'(data-[\w-]+)="([^"]*)"', tag)) == expected


def test_it_can_be_left_out():
    assert app_client(ours=False).get("/playground").status_code == 404, (
        "nor have other models it"
    )
    client = app_client("--additional-config", '{"dllm": {"playground": false}}')
    assert client.get("/playground").status_code == 404
    args, _ = build_parser().parse_known_args(["serve", "demo", "--no-playground"])
    assert merged_config(args) == {"dllm": {"playground": False}}
    assert not EngineOptions.parse({"playground": False}).playground


def test_with_an_api_key_the_page_loads_and_nothing_else_does():
    client = app_client("--api-key", "secret")
    page = client.get("/playground")
    assert page.status_code == 200
    assert "secret" not in page.text
    assert client.get("/v1/models").status_code == 401


def test_the_policy_lets_only_the_pages_own_style_and_script_run():
    answer = app_client().get("/playground")
    assert (answer.status_code, answer.text) == (200, playground.page())
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    parts = answer.headers["Content-Security-Policy"].split("; ")
    allowed = {name: sources for name, *sources in map(str.split, parts)}
    assert allowed["default-src"] == ["'none'"]
    assert allowed["connect-src"] == ["'self'"]
    for name in ("base-uri", "form-action", "frame-ancestors"):
        assert allowed[name] == ["'none'"]
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        (body,) = re.findall(
            rf"<{tag}>(.*?)</{tag}>", playground.page(), flags=re.DOTALL
        )
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert allowed[name] == [f"'sha256-{digest}'"]


@pytest.fixture(scope="module")
def tags():
    tags = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag, attrs):
            tags.append((tag, dict(attrs)))

    parser = Tags()
    parser.feed(playground.page())
    return tags


def test_nothing_is_loaded_from_elsewhere(tags):
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", playground.page())
    for tag, attributes in tags:
        assert not attributes.keys() & {"src", "srcset", "action", "style"}, tag
        assert not any(name.startswith("on") for name in attributes), tag
        assert attributes.get("href", "#").startswith("#")
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")


def test_text_cannot_become_markup_or_code_and_the_key_is_not_stored():
    sinks = (
        "innerHTML outerHTML insertAdjacentHTML document.write eval( Function( "
        "DOMParser setHTML"
    )
    stores = "localStorage sessionStorage document.cookie"
    assert not [
        name for name in f"{sinks} {stores}".split() if name in playground.page()
    ]


def test_every_field_has_a_label_and_every_id_is_unique(tags):
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    labelled = {attributes.get("for") for tag, attributes in tags if tag == "label"}
    fields = [
        attributes["id"]
        for tag, attributes in tags
        if tag in ("input", "select", "textarea")
    ]
    assert set(fields) <= labelled
    named = {
        a[n] for _, a in tags for n in ("aria-labelledby", "aria-describedby") if n in a
    }
    assert named | set(re.findall(r'\$\("([^"]+)"\)', playground.page())) <= set(ids), (
        "what the script names too"
    )
