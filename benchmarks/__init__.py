"""Benchmarks: speed, size and traffic, printed as ratios and recorded under results/."""
