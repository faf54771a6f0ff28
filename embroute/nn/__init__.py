"""The PyTorch front end: `prepare`, routed layers, a worker's training session."""
