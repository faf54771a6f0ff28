"""Published rules that choose the worker of each sample."""
