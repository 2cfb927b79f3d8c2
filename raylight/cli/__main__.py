"""`python -m raylight.cli`."""

from raylight.cli import main

main()
