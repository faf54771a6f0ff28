"""The command line, one or two commands a module."""
