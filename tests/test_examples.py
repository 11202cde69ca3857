"""Examples and documentation that need no model run as they stand."""

import re
import runpy
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]


def test_shared_prefix(capsys):
    """Two levels of attention, merged, are attention over one cache with everything, which is three times as large."""
    runpy.run_path(str(ROOT / "examples" / "shared_prefix.py"), run_name="__main__")
    error, ours, whole = (float(x) for x in re.findall(r"\d[\d.e+-]*(?= bytes|\n)", capsys.readouterr().out))
    assert error < 1e-3
    assert 3 * ours < whole


def test_attention_page():
    """The snippets of docs/attention.md, one after the other in one namespace."""
    text = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    names: dict = {}
    for snippet in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(snippet, names)
    assert np.isfinite(np.asarray(names["out"])).all()
