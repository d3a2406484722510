"""The stresses, in the page's order."""

from pathlib import Path

from . import accumulation, gradient_formats, jumps, late_state, outliers, schedules, second_moment, small_rates, sums
from .suite import Point, Stress

SUITE = tuple(
    module.STRESS
    for module in (small_rates, outliers, jumps, gradient_formats, second_moment, sums, accumulation, schedules)
)


def suite(points: list[Point], late: Path | None = None) -> tuple[Stress, ...]:
    """Those, and S3 in a late state. late: the weights' folder; points: of the store."""
    return *SUITE, late_state.stress(late, points)
