"""Prompts in which an editor marks the text before and behind the cursor, in the forms
on which left-to-right models are trained.
"""

import re
from typing import NamedTuple


class Around(NamedTuple):
    """The texts around the cursor."""

    prefix: str
    suffix: str


class Markers(NamedTuple):
    """Texts before the prefix, before the suffix, and at the prompt's end."""

    prefix: str
    suffix: str
    middle: str
    needs_prefix: bool = True


_MARKERS = (
    # Mercury's prompts have no marker before the prefix.
    Markers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", needs_prefix=False),
    Markers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    Markers("<PRE> ", " <SUF> ", " <MID>"),  # twinny's form
    Markers("<PRE> ", " <SUF>", " <MID>"),
    Markers("<PRE>", " <SUF> ", " <MID>"),  # twinny's form with other files
    Markers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    Markers("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),
    Markers("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)
"""Markers of Qwen2.5-Coder, CodeGemma and Granite; StarCoder and Stable Code;
CodeLlama; DeepSeek; Seed-Coder; GLM and CodeGeeX.
"""
_TURN_END = re.compile(r"<\|assistant\|>\s*$")
_FILE = re.compile(r"<\|?file_sep\|?>")
_REPOSITORY = re.compile(r"<\|?repo_name\|?>[^\n]*\n?")
_PATH = re.compile(r"[\w./\\ -]*[\w-]\.\w+")


def read_markers(prompt: str) -> Around | None:
    """The texts around the cursor; None for a prompt without markers."""
    prompt = _TURN_END.sub("", prompt)
    for markers in _MARKERS:
        if prompt.endswith(markers.middle):
            read = _around(prompt.removesuffix(markers.middle), markers)
            if read is not None:
                return read
    return _around_in_codestrals_order(prompt)


def _around_in_codestrals_order(prompt: str) -> Around | None:
    context, suffix_marker, rest = prompt.partition("[SUFFIX]")
    suffix, prefix_marker, prefix = rest.partition("[PREFIX]")
    if not suffix_marker or not prefix_marker:
        return None
    return Around(_files(context.removesuffix("<s>")) + prefix, suffix)


def _around(text: str, markers: Markers) -> Around | None:
    """The texts around the cursor in ``text``, which is without the marker at its end.
    The edited text may have markers itself: the last suffix marker counts, and the
    first prefix marker.
    """
    behind, before = text.rfind(markers.suffix), text.find(markers.prefix)
    if behind < 0 or (before < 0 and markers.needs_prefix):
        return None
    after_behind = behind + len(markers.suffix)
    if before < 0:
        return Around(text[:behind], text[after_behind:])
    after_before = before + len(markers.prefix)
    if before < behind:
        context, prefix = text[:before], text[after_before:behind]
        suffix = text[after_behind:]
    else:
        context, prefix = text[:behind], text[after_before:]
        suffix = text[after_behind:before]
    return Around(_files(context) + prefix, suffix)


def _files(context: str) -> str:
    """Files of the repository, each with its path as a comment."""
    texts = []
    for part in _FILE.split(_REPOSITORY.sub("", context)):
        path, line_end, text = part.partition("\n")
        has_path = line_end and _PATH.fullmatch(path)
        texts.append(file_text(path, text) if has_path else part)
    return "".join(texts)


def file_text(path: str, text: str) -> str:
    """The text of another file, as models read it before the edited file."""
    line_end = "\n" if text and not text.endswith("\n") else ""
    return f"# {path}\n{text}{line_end}"
