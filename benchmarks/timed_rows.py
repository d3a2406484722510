"""The command line of a benchmark that times rows of a table: --csv and --commit."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from stamp import commit


@contextlib.contextmanager
def measured(doc: str, table: Callable[[str], Any]) -> Iterator[Any]:
    """`table(commit)`, to be filled; then it is written to --csv, if that is given. doc: of the benchmark."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--csv", metavar="PATH", help="also write the rows to PATH")
    parser.add_argument("--commit", default=commit(), help="the commit that the rows name")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = table(arguments.commit)
    yield rows
    if arguments.csv:
        rows.write(arguments.csv)
