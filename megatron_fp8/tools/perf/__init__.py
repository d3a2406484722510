"""Compute what a job costs from its flags (memory, time, layouts), and compare runs."""
