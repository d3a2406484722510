"""From files to a job on a cluster: the command line that they make, and the Slurm script around it."""
