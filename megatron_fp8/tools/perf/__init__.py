"""What a job costs, computed from its flags: memory, time, layouts; and runs compared."""
