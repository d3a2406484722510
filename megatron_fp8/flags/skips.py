"""--fp8-max-skipped-steps: ends a run that skips too many steps in a row.

A step is skipped if its gradient norm is not finite, is a spike (--fp8-on-spike skip) or exceeds one of stock's
thresholds. One skipped step is a bad batch. But once the weights are not finite, every later step is skipped, and
stock's loss check, which would end the run, may be off. The limit can be low: BF16 has no loss scaling, so no steps are
skipped to find a scale. If every second batch were bad, twenty in a row would come once in a million steps. Twenty is
above the eight spikes in a row that --fp8-on-spike skip may skip.
"""

from argparse import Namespace

from .flag import Flag, whole

_USUAL = 20
MAX_SKIPPED = Flag(
    "--fp8-max-skipped-steps",
    "End the run after N skipped steps in a row (a gradient norm that is not finite, for example); 0: never. Default "
    f"{_USUAL}.",
    whole(0, "never"),
)


def most_skipped(args: Namespace) -> int:
    """The limit, in steps in a row; 0: no limit."""
    value = MAX_SKIPPED.given(args)
    return _USUAL if value is None else value
