"""Proves that the tests notice a broken part: ``python tests/mutations.py [oracle|serving]`` breaks one at a time.

Each mutation of ``tests/mutants.py`` is applied to the oracle and, in its own run, to the serving side, and the fast tests
run in a process of their own; a mutation is killed when a test fails. Prints a table and ends with 1 if one survived.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("oracle", "serving")
PASSED, FAILED = 0, 1  # exit codes of pytest; anything else is an error of the run


def names() -> list[str]:
    """The mutations, read from the source: importing it needs the repository's root on the path."""
    source = (ROOT / "tests" / "mutants.py").read_text(encoding="utf-8")
    return re.findall(r'\bname="([^"]+)"', source)


def run_tests(side: str, *mutation: str) -> tuple[bool, str, float]:
    """Whether the side's tests passed under the mutation (none given: unbroken), the first failure, and the seconds."""
    command = [sys.executable, "-m", "tests.mutants", side, *mutation]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode not in (PASSED, FAILED):
        raise SystemExit(f"the tests did not run under {mutation}:\n{done.stdout}\n{done.stderr}")
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    first = failures[0].split(" ")[1].rpartition("/")[2] if failures else ""
    return done.returncode == PASSED, first, time.monotonic() - start


def main() -> int:
    """Print which test kills which mutation; 1 if one survives."""
    survivors = 0
    print(f"{'mutation':34}{'side':10}{'killed by':90}{'s':>6}")
    for side in sys.argv[1:] or SIDES:
        passed, first, seconds = run_tests(side)
        if not passed:
            raise SystemExit(f"the unbroken {side} tests fail already: {first}")
        print(f"{'none':34}{side:10}{'(passes, as it must)':90}{seconds:6.1f}", flush=True)
        for name in names():
            passed, first, seconds = run_tests(side, name)
            survivors += passed
            print(f"{name:34}{side:10}{first or 'SURVIVED':90}{seconds:6.1f}", flush=True)
    print(f"{survivors} survived" if survivors else "every mutation was killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
