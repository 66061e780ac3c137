"""Reservation and allocation of pages over vLLM's own block pool."""

import pytest

from dllm_engine.scheduler.page_pool import PagePool, prefix_keys

HASHES = [bytes([i]) * 32 for i in range(6)]


def keys_of(num_tokens: int, block_length: int = 16, hashes=HASHES) -> list[bytes]:
    return prefix_keys(hashes, 16, block_length, range(num_tokens // 16))


@pytest.fixture
def sharing() -> PagePool:
    """Ten pages; request a has filled two pages in each of two tables."""
    pool = PagePool(num_pages=11, hash_block_size=16, shares=True)
    pool.reserve("a", 6)
    pool.resize("a", [2, 2])
    pool.add_keys("a", keys_of(32))
    return pool


@pytest.mark.parametrize(
    ("block_length", "num_tokens", "covered"),
    # By how many tokens each page's key is told.
    [
        (16, 48, [16, 32, 48]),
        (4, 48, [16, 32, 48]),
        (32, 64, [32, 32, 64, 64]),
        (24, 48, [32, 48, 48]),
        (96, 32, [96] * 2),
    ],
)
def test_a_key_is_of_all_tokens_up_to_the_end_of_the_last_block_in_the_page(block_length, num_tokens, covered):
    keys = keys_of(num_tokens, block_length)
    assert [key[:32] for key in keys] == [HASHES[tokens // 16 - 1] for tokens in covered]
    assert len(set(keys)) == len(keys)
    assert not set(keys) & set(keys_of(96, block_length + 1)), "another block length is another function"
    assert len(keys_of(96, 32, HASHES[:3])) == 2, "a page whose last block is not known yet has none"


def test_shared_pages_count_once_and_outlive_their_first_request(sharing):
    found = sharing.find(keys_of(96), 2)
    sharing.reserve("b", 8, found)
    assert (sharing.num_allocated, sharing.num_reserved) == (4, 10)
    assert not sharing.can_reserve(1)
    tables = sharing.resize("b", [4, 4])
    assert [table[:2] for table in tables] == sharing.resize("a", [2, 2])
    sharing.free("a")
    assert (sharing.num_allocated, sharing.num_reserved) == (8, 8)
    sharing.free("b")
    assert (sharing.num_allocated, sharing.num_reserved) == (0, 0)
    assert len(sharing.find(keys_of(96), 2)[0]) == 2, "they stay until the pool needs them"
    sharing.reserve("c", 10, sharing.find(keys_of(96), 2))
    assert (sharing.num_allocated, sharing.num_reserved) == (4, 10)


def test_the_end_of_a_prefix_is_used_again_first(sharing):
    sharing.free("a")
    sharing.reserve("b", 8)
    sharing.resize("b", [4, 4])
    assert [len(table) for table in sharing.find(keys_of(96), 2)] == [1, 1]
