"""Judge a sweep's curves: divergence, gaps, early warnings, with statistics and plots."""
