"""The step protocol: the messages that ranks exchange beside rows, and their form in bytes."""
