"""Which rows move, and when an update comes home."""
