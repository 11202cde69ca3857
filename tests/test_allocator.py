"""The allocator hands each page to whom it says, and refuses what would hand it out twice."""

import numpy as np
import pytest

from jax_foscar import OutOfPages, PageAllocator


def test_pages_come_and_go():
    pages = PageAllocator(4)
    first, second = pages.allocate(3), pages.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert (pages.num_pages, pages.num_free) == (4, 0)
    pages.free(first[:2])
    assert sorted(pages.allocate(2)) == sorted(first[:2])
    assert pages.allocate(0) == []
    assert repr(pages) == "PageAllocator(4 pages, 0 free)"


def test_shared_pages_are_free_once_no_row_holds_them():
    pages = PageAllocator(4)
    row = pages.allocate(2)
    fork = pages.fork(np.array(row))
    assert fork == row
    assert [pages.references(page) for page in range(4)].count(2) == 2
    pages.free(row)
    assert pages.num_free == 2
    pages.free(fork)
    assert pages.num_free == 4
    assert pages.references(row[0]) == 0


def test_out_of_pages_takes_none():
    pages = PageAllocator(4)
    pages.allocate(3)
    with pytest.raises(OutOfPages, match=r"^count=2 pages were asked for, but 1 of 4 are free: free those of finished"):
        pages.allocate(2)
    assert pages.num_free == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.free([0, 1, 0]), r"ids: page 0 is freed 2 times, but held 1 times; free once what"),
        (lambda p: p.free([1, 2]), r"ids: page 2 is freed 1 times, but held 0 times"),
        (lambda p: p.free([0, -1]), r"ids: page -1 is not in \[0, 4\); leave the table's padding out"),
        (lambda p: p.free(np.array([4])), r"ids: page 4 is not in \[0, 4\)"),
        (lambda p: p.fork([0, 3]), r"ids: page 3 is free and cannot be shared; allocate it first"),
        (lambda p: p.fork([9]), r"ids: page 9 is not in \[0, 4\)"),
        (lambda p: p.references(4), r"ids: page 4 is not in \[0, 4\)"),
        (lambda p: p.allocate(-1), r"count must be at least 0, got -1"),
        (lambda p: PageAllocator(0), r"num_pages must be at least 1, got 0"),
    ],
)
def test_misuse_names_the_page_and_changes_nothing(call, message):
    pages = PageAllocator(4)
    pages.allocate(2)
    with pytest.raises(ValueError, match=f"^{message}"):
        call(pages)
    assert [pages.references(page) for page in range(4)] == [1, 1, 0, 0]
    assert pages.num_free == 2


def test_ids_are_ints():
    with pytest.raises(TypeError, match=r"^ids must be an int, got 1\.0"):
        PageAllocator(4).free([1.0])
