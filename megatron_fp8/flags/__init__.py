"""What a user types: levels, flags of ours and of stock's, what a run is refused, and its one line."""
