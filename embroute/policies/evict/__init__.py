"""Which copy leaves a full cache."""
