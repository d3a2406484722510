"""What people run beside training: no training process imports any of it (tests/unit/test_imports.py)."""
