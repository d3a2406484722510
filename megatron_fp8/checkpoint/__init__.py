"""Checkpoints: what of a level they hold, their seals, saving and finding them; conversion to and from other forms."""
