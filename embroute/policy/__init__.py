"""The brain: pure decisions from row ids to plans. No I/O, no torch."""
