"""The stresses, in the page's order."""

from . import accumulation, gradient_formats, jumps, outliers, schedules, second_moment, small_rates, sums

SUITE = tuple(
    module.STRESS
    for module in (small_rates, outliers, jumps, gradient_formats, second_moment, sums, accumulation, schedules)
)
