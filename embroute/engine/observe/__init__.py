"""What a run measures of itself: traffic, times, row versions, a baseline policy."""
