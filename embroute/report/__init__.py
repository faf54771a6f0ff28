"""Reports of comparisons and runs as self-contained HTML pages."""
