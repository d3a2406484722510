"""What the data-parallel group owns: the four linears' weights, gradients and optimizer state."""
