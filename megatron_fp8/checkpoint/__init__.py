"""Checkpoints: a level's state in them, their seals, saving, loading, and conversion to and from Hugging Face."""
