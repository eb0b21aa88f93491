"""The command line: `postdate COMMAND`. `app` parses and runs a command; each command has a module of its name."""

from postdate.cli.app import main

__all__ = ["main"]
