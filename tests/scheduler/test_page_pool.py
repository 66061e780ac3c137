"""Reservation and allocation of pages over vLLM's own block pool."""

import pytest

from dllm_engine.scheduler.page_pool import PagePool


@pytest.fixture
def pool() -> PagePool:
    return PagePool(num_pages=11, hash_block_size=16)  # one of them is vLLM's null block


def test_null_block_is_not_handed_out(pool):
    assert pool.num_pages == 10
    pool.reserve("a", 10)
    (pages,) = pool.resize("a", [10])
    assert sorted(pages) == list(range(1, 11))


def test_reservation_counts_before_allocation(pool):
    pool.reserve("a", 4)
    assert (pool.num_reserved, pool.num_allocated) == (4, 0)
    assert pool.usage == pytest.approx(0.4)
    pool.resize("a", [1, 2])
    assert (pool.num_reserved, pool.num_allocated) == (4, 3)
    assert pool.can_reserve(6)
    assert not pool.can_reserve(7)


def test_pages_of_two_requests_are_disjoint(pool):
    pool.reserve("a", 5)
    pool.reserve("b", 5)
    pool.resize("a", [1, 1])
    pool.resize("b", [3])
    tables = pool.resize("a", [2, 3]) + pool.resize("b", [5])
    assert [len(table) for table in tables] == [2, 3, 5]
    assert len({page for table in tables for page in table}) == 10


def test_a_table_keeps_the_pages_it_has(pool):
    pool.reserve("a", 6)
    before = pool.resize("a", [2, 3])
    grown = pool.resize("a", [4, 2])
    assert grown[0][:2] == before[0]
    assert grown[1] == before[1][:2]
    assert pool.num_allocated == 6


def test_a_table_may_grow_on_what_another_gives_back():
    pool = PagePool(num_pages=5, hash_block_size=16)
    pool.reserve("a", 4)
    pool.resize("a", [1, 3])
    assert [len(table) for table in pool.resize("a", [3, 1])] == [3, 1]


def test_freed_pages_and_reservation_can_be_used_again(pool):
    pool.reserve("a", 10)
    pool.resize("a", [7])
    for name in ("a", "a", "stranger"):
        pool.free(name)
    assert (pool.num_reserved, pool.num_allocated, pool.usage) == (0, 0, 0.0)
    assert PagePool(num_pages=1, hash_block_size=16).usage == 0.0, "an empty pool is not in use"
    pool.reserve("none", 0)
    assert pool.resize("none", [0, 0]) == [[], []]
    pool.reserve("b", 10)
    assert len(pool.resize("b", [10])[0]) == 10


def test_request_cannot_allocate_more_than_it_reserved(pool):
    pool.reserve("a", 4)
    pool.resize("a", [3])
    with pytest.raises(ValueError, match=r"request a wants 5 pages, but reserved 4"):
        pool.resize("a", [3, 2])
    assert pool.num_allocated == 3


def test_a_request_reserves_once_before_it_allocates(pool):
    with pytest.raises(KeyError):
        pool.resize("a", [1])
    pool.reserve("a", 1)
    with pytest.raises(ValueError, match="request a has reserved pages already"):
        pool.reserve("a", 1)


def test_reservation_beyond_the_pool_is_refused_with_numbers(pool):
    pool.reserve("a", 8)
    with pytest.raises(ValueError, match=r"3 pages wanted, 2 of 10 left"):
        pool.reserve("b", 3)
    assert pool.num_reserved == 8
