"""What the model is made of: FP8 linears, norms and attention, and the layer spec that puts them in."""
