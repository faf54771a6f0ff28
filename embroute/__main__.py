"""`python -m embroute` is the command line."""

from embroute.cli.main import main

main()
