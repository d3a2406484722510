"""`megatron-fp8 lab merge STORE OTHER...`: add the runs that have ended in other stores of one plan.

Sweeps on machines without a common file system write stores of their own. Give each a plan of its own seeds, or let
them start from copies of one store. A run that several stores have is taken from the first: STORE, then the others in
their order. All are merged or none.
"""

from argparse import ArgumentParser, Namespace
from contextlib import ExitStack, closing
from pathlib import Path

from ....errors import UserError
from .store import Store


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `megatron-fp8 lab merge`."""
    parser.add_argument("store", help="the store that gets the runs; made if it is missing")
    parser.add_argument("others", nargs="+", metavar="other", help="stores of `lab sweep`, which stay as they are")


def run(args: Namespace) -> int:
    """Merge, and print how many runs came from each store."""
    into, others = Path(args.store), []
    with ExitStack() as opened:
        for path in args.others:
            if Path(path).resolve() == into.resolve():
                raise UserError(f"{path}: is the store to merge into; leave it out")
            others.append(opened.enter_context(closing(Store(path))))
            others[-1].outline()  # one that cannot be read is refused before `into` is made
        store = opened.enter_context(closing(Store(into, create=True)))
        for path, (added, kept) in zip(args.others, store.take(others), strict=True):
            print(f"{path}: {added} added, {kept} already here")
        print(f"{into}: {', '.join(f'{count} {state}' for state, count in store.counts().items() if count)}")
    return 0
