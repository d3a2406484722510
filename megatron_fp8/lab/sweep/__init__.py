"""Many runs of one command: the plan, the processes, the store of their curves."""
