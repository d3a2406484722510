"""Many runs of one command: the plan, a run, and the store of the runs' curves."""
