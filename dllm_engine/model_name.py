"""A model's own name, which may tell what its config.json does not: a base model, or
the length of its blocks.
"""

import os
import re

_SNAPSHOT = re.compile(r"(?:^|/)models--(?:[^/]+?--)?([^/]+)/snapshots/[^/]+")
"""A snapshot in the Hub's cache, which has a hash for a name:
``models--ORG--NAME/snapshots/HASH``.
"""


def own_name(model: str) -> str:
    """The name of a model without what it belongs to or lies in: ``Model-8B-Instruct``.

    Of a path it is the last component, of a name on the Hub the part behind the
    organization, and of a snapshot in the Hub's cache that of its repository. The
    folders above a model say nothing about it.
    """
    path = os.path.abspath(os.path.expanduser(model))
    snapshot = _SNAPSHOT.search(path)
    name = os.path.basename(path) if snapshot is None else snapshot[1]
    # ModelScope's cache cannot have a dot in the name of a folder.
    return name.replace("___", ".")


def has_word(name: str, word: str) -> bool:
    """Return True if a name has a word, in any case: ``Model-8B-Base`` has ``base``,
    and ``database`` has not.
    """
    return (
        re.search(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])", name, re.IGNORECASE)
        is not None
    )
