"""The examples of the documentation run, in order, as one program a page."""

import re
from pathlib import Path

import numpy as np
import pytest

DOCS = Path(__file__).parent.parent / "docs"


def run(page):
    """The names that a page's Python blocks leave behind."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        exec(compile(block, page, "exec"), names)
    return names


def test_serving():
    names = run("serving.md")
    cache, allocator, fmt = names["cache"], names["allocator"], names["fmt"]
    np.testing.assert_array_equal(cache.length, names["lengths"])
    np.testing.assert_array_equal(cache.length, [151, 153, 128, 0])
    table = np.asarray(cache.page_table)
    assert (table[0, :2] == table[1, :2]).all()
    assert (table[0, :2] == table[2, :2]).all()
    assert table[0, 2] != table[1, 2]
    k, _ = cache.dequantize()
    assert (np.asarray(k) == (np.arange(cache.capacity) < np.asarray(cache.length)[:, None])[..., None, None]).all()
    assert [allocator.references(page) for page in names["prefix"]] == [4, 4]
    for row in range(3):
        cache = names["retire"](cache, row)
    allocator.free(names["prefix"])
    assert allocator.num_free == allocator.num_pages
    assert fmt.full_pages(150) == 2
    with pytest.raises(names["OutOfPages"]):
        allocator.allocate(25)
