"""Processes that programs under test have started."""

import contextlib

import psutil

BUILDER = "dllm_engine.structured_output.build"
"""Words in the command of a process that builds an automaton."""


def children_of(process: psutil.Process, words: str = "") -> list[psutil.Process]:
    """The processes below one whose command has ``words``. Such a process may end while
    it is looked at.
    """
    children = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if words in " ".join([child.name(), *child.cmdline()]):
                children.append(child)
    return children
