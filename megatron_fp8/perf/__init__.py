"""What a job costs, computed from its flags: memory."""
