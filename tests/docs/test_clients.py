"""``docs/clients.md`` shows what ``scripts/clients.py`` tries."""

import re

from clients import CHECKS, PAGE


def test_each_call_is_listed_and_works():
    rows = re.findall(
        r"^\| (\S+) \| [\d.]+ \| `(.*)` \| yes \|$", PAGE.read_text("utf-8"), re.M
    )
    assert rows == [(check.package, check.call) for check in CHECKS]
