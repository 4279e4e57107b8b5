"""`python -m sideline` is the command `sideline`."""

from sideline.cli.main import main

main()
