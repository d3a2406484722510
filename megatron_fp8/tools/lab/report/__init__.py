"""What a sweep's curves say: divergence, gaps, early warnings, with their statistics and plots."""
