"""Finding: one line of the doctor, with its verdict."""

import subprocess
from dataclasses import dataclass

GOOD, DEGRADED, BLOCKING = "good", "degraded", "blocking"


@dataclass(frozen=True)
class Finding:
    """One line: what was checked, the verdict, what was found, and a remedy unless the verdict is good."""

    what: str
    verdict: str
    found: str
    remedy: str = ""


def good(what: str, found: str) -> Finding:
    return Finding(what, GOOD, found)


def degraded(what: str, found: str, remedy: str) -> Finding:
    """A run works, but more slowly or less safely."""
    return Finding(what, DEGRADED, found, remedy)


def blocking(what: str, found: str, remedy: str) -> Finding:
    """No run with a level can start, or its results cannot be trusted."""
    return Finding(what, BLOCKING, found, remedy)


def output_of(*command: str, timeout: float = 30) -> str | None:
    """A command's output; None if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
