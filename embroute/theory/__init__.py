"""Expected communication from access counts alone."""
