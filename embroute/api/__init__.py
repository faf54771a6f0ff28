"""The simulator in Python: data, comparisons, single policies. Nothing here needs torch."""
