"""Everything that the owner of a B200 can tell us about the tcgen05 kernel, in one file to send.

    make verify-sm100                        # in a clone, on the machine with the GPU
    python benchmarks/verify_sm100.py --report sm100-report.txt

Runs, with JAX_FOSCAR_SM100=tcgen05: the kernel's tests, compute-sanitizer's tools over a few of them, and the
benchmark, which is also run without the variable. A step that fails or hangs does not keep the others from running.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
PYTEST = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "tests/test_blackwell_gpu.py"]
BENCHMARK = [sys.executable, "benchmarks/decode.py", "--no-peers", "--shapes", "batch128", "batch16", "single"]
BENCHMARK += ["dim64", "--formats", "k4t,v4t", "k2t,v2t", "k4c64,v4t64", "k2c64,v2t64", "k4t64,v4c64", "k2t64,v2c64"]
SANITIZED = "test_formats and (k4t-v4t or k2c64-v2t64 or k2t32-v4c32) or test_dtypes"
# Elsewhere the tests skip themselves, which is no verification.
THERE = "import sys; sys.path.insert(0, 'tests'); import test_blackwell_gpu as t; sys.exit(not t.there())"
MINUTES = 60  # a step may take


def run(report: TextIO, title: str, command: list[str], tcgen05: bool = True) -> bool:
    """Runs a step, its output to the terminal's user as a line and to the report in full."""
    environment = {**os.environ}
    environment.pop("JAX_FOSCAR_SM100", None)
    if tcgen05:
        environment["JAX_FOSCAR_SM100"] = "tcgen05"
    print(f"{title} ...", end=" ", flush=True)
    report.write(f"\n=== {title}\n$ {' '.join(command)}\n")
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=60 * MINUTES,
        )  # fmt: skip
        output, good, verdict = done.stdout, done.returncode == 0, f"exit status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        good, verdict = False, f"stopped after {MINUTES} minutes: a deadlock?"
    except FileNotFoundError as error:
        output, good, verdict = "", False, str(error)
    report.write(f"{output}\n--- {verdict}\n")
    report.flush()
    print("passed" if good else verdict)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, default=ROOT / "sm100-report.txt")
    args = parser.parse_args()
    with args.report.open("w") as report:
        run(report, "GPU", ["nvidia-smi"])
        run(report, "configuration", [sys.executable, "-P", "-m", "jax_foscar"])
        run(report, "revision", ["git", "log", "-1", "--oneline"])
        if not run(report, "the kernel serves this GPU", [sys.executable, "-P", "-c", THERE]):
            sys.exit("Needs a GPU of compute capability 10.x, and a CUDA module built for it by nvcc 12.9 or newer.")
        passed = run(report, "tests", [*PYTEST, "-rs"])
        sanitizer = shutil.which("compute-sanitizer") or "compute-sanitizer"
        for tool in ("memcheck", "racecheck", "synccheck"):
            run(report, f"compute-sanitizer {tool}", [sanitizer, "--tool", tool, *PYTEST, "-k", SANITIZED])
        run(report, "benchmark with tcgen05", BENCHMARK)
        run(report, "benchmark without", BENCHMARK, tcgen05=False)
    print(f"{args.report}: please send it to the maintainers, whatever it says.")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
