"""`python -m embroute` is the command line."""

from embroute.cli import main

main()
