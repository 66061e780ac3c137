"""Fixtures of the command line's tests."""

import pytest


@pytest.fixture(scope="session")
def demo(engines):
    """The demo model, two requests at a time."""
    return engines("demo", skip_tokenizer_init=False, max_num_seqs=2, trace=False)
