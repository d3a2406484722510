"""Writes a page of docs/ that is made from code, or checks that it is fresh: the command line of make_*_doc.py."""

import argparse
import sys
from pathlib import Path


def write_or_check(page: Path, text: str, tool: str, description: str) -> int:
    """Write `text` to the page; with --check on the command line only compare. Returns the exit code.

    tool: the script's name, for the remedy.  description: of the script, for --help.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is stale")
    if not parser.parse_args().check:
        page.write_text(text)
    elif not page.exists() or page.read_text() != text:
        print(f"{page.name} is stale: run python tools/{tool}", file=sys.stderr)
        return 1
    return 0
