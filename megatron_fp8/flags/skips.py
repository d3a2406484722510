"""How long a run may stand still: --fp8-max-skipped-steps.

A step is skipped where its gradient norm is not finite, is a spike (--fp8-on-spike skip) or is over a threshold of
stock's. One is a bad batch; but weights that are not finite skip every step that follows, and stock's loss check, which
would end the run, may be off. Without loss scaling no step is skipped to find a scale, as FP16's first ones are, so the
limit may be low: if every second batch were bad, twenty in a row would come once in a million steps. It is above the
eight spikes that --fp8-on-spike skip passes over in a row.
"""

from argparse import Namespace

from .flag import Flag, whole

_USUAL = 20
MAX_SKIPPED = Flag(
    "--fp8-max-skipped-steps",
    "End the run when N steps in a row were skipped, for a gradient norm that is not finite, say: its weights stand "
    f"still; 0: never. Default {_USUAL}.",
    whole(0, "never"),
)


def most_skipped(args: Namespace) -> int:
    """Steps in a row; 0: no limit."""
    value = MAX_SKIPPED.given(args)
    return _USUAL if value is None else value
