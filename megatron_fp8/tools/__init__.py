"""What people run beside training. No training process imports it (tests/unit/test_imports.py)."""
