"""Click models over embedding records, and the samples they read."""
