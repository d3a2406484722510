"""The verbs `args` and `launch`: files of flags become a command line, and a Slurm script around it."""
