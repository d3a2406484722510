"""The tools beside training. No training process imports them (tests/unit/test_imports.py)."""
