"""Many runs of one command: the plan, a run, the store of their curves."""
