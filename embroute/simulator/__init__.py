"""Plans priced without training: measurements, comparisons, sweeps, the adviser."""
