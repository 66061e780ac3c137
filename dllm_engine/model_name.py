"""A model's own name. It may state facts that its config.json lacks: a base model, or
the length of its blocks.
"""

import os
import re

_SNAPSHOT = re.compile(r"(?:^|/)models--(?:[^/]+?--)?([^/]+)/snapshots/[^/]+")
"""Path of a snapshot in the Hub's cache, whose folder is named by a hash:
``models--ORG--NAME/snapshots/HASH``.
"""


def own_name(model: str) -> str:
    """The name of a model without organization or folder: ``Model-8B-Instruct``.

    For a path it is the last component, for a name on the Hub the part after the
    organization, and for a snapshot in the Hub's cache the name of the repository. The
    folders above a model say nothing about it.
    """
    path = os.path.abspath(os.path.expanduser(model))
    snapshot = _SNAPSHOT.search(path)
    name = os.path.basename(path) if snapshot is None else snapshot[1]
    # ModelScope's cache cannot have a dot in the name of a folder.
    return name.replace("___", ".")


def has_word(name: str, word: str) -> bool:
    """Return True if a name contains a word, in upper or lower case: ``Model-8B-Base``
    contains ``base``, but ``database`` does not.
    """
    return (
        re.search(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])", name, re.IGNORECASE)
        is not None
    )
