"""Reports one can see: self-contained HTML pages of comparisons and runs."""
