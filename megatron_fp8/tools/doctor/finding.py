"""What the doctor says: a line each, and how bad it is."""

import subprocess
from dataclasses import dataclass

GOOD, DEGRADED, BLOCKING = "good", "degraded", "blocking"


@dataclass(frozen=True)
class Finding:
    """A line: what was looked at, a verdict, what was found, and what to do unless that is good."""

    what: str
    verdict: str
    found: str
    remedy: str = ""


def good(what: str, found: str) -> Finding:
    return Finding(what, GOOD, found)


def degraded(what: str, found: str, remedy: str) -> Finding:
    """A run works, more slowly or with less safety."""
    return Finding(what, DEGRADED, found, remedy)


def blocking(what: str, found: str, remedy: str) -> Finding:
    """No run with a level can start, or its results cannot be trusted."""
    return Finding(what, BLOCKING, found, remedy)


def output_of(*command: str, timeout: float = 30) -> str | None:
    """What a command prints; None where it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
