"""typer's runner of command lines, which builds the commands of a program once.

typer itself builds raylight's for each command line, in 25 ms.
"""

import functools

import typer.testing
from typer.testing import CliRunner

__all__ = ["CliRunner"]
typer.testing._get_command = functools.cache(typer.testing._get_command)
