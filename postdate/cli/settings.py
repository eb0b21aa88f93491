"""`postdate settings`: the settings in force and the source of each, or a TOML file to start from."""

import argparse
import os
import sys

from postdate import config
from postdate.cli.command import OK, USAGE, add_json, print_json, set_run
from postdate.cli.render import print_table
from postdate.config import FIELDS, FLUSH_MODES, GROUPS, LIMITS, PIPELINES, Loaded, text_of

HELP = """\
Prints the settings that `postdate up` would have in this folder, and the source of each.

examples:
  postdate settings                                  value and source of each setting
  postdate settings --lead-ms 30s                    the same with a flag of postdate up
  postdate settings --config /etc/postdate.toml --json
  postdate settings --toml > postdate.toml           a file to start from: every default, with its reason

A setting is taken from its flag, else from the environment (POSTDATE_ and its name in capitals), else from the file,
else it has its default. Sizes may be written as 64MiB, spans as 500ms, 30s, 10m, 72h or 7d.

exit codes: 0 printed, 2 wrong usage, or a file or setting that cannot be used
"""

# By the name of a setting, else by its type.
_METAVARS: dict[str | type, str] = {
    "flush": "|".join(FLUSH_MODES), "pipeline": "|".join(PIPELINES), "data": "DIR", "java_home": "DIR",
    bool: "true|false", str: "TEXT", int: "N",
}  # fmt: skip
DEFAULT = "default"  # the source of a setting that nothing sets


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = "postdate settings [-h] [--config FILE] [--toml] [--json] [--SETTING VALUE]..."
    parser.add_argument("--toml", action="store_true", help="print a file of all defaults, each with its reason")
    add_json(parser)
    add_settings(parser)
    set_run(parser, _settings, failed=USAGE)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that set something: --config, and one for each setting."""
    parser.add_argument("--config", metavar="FILE", help="settings in TOML (default: ./postdate.toml if it exists)")
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            field = FIELDS[name]
            default, why = text_of(name, field.default), field.metadata["why"].replace("%", "%%")
            group.add_argument(
                config.flag_of(name), dest=name,
                metavar=_METAVARS.get(name) or _METAVARS[field.type],
                help=f"{why} (default: {default})" if default else why,
            )  # fmt: skip
    for name in LIMITS:  # settings once: a warning tells their fixed values
        parser.add_argument(config.flag_of(name), dest=name, help=argparse.SUPPRESS)


def load_settings(arguments: argparse.Namespace) -> Loaded:
    """Settings from the flags, the environment and the file that the arguments name. Raises UsageError."""
    flags = {name: value for name in (*FIELDS, *LIMITS) if (value := getattr(arguments, name)) is not None}
    return config.load(file=config.find_file(arguments.config, os.environ), environ=os.environ, flags=flags)


def _settings(arguments: argparse.Namespace) -> int:
    if arguments.toml:
        print(toml(), end="")
        return OK
    loaded = load_settings(arguments)
    for warning in loaded.warnings:
        print(f"postdate: warning: {warning}", file=sys.stderr)
    values = vars(loaded.settings)
    sources = {name: loaded.sources.get(name, DEFAULT) for name in FIELDS}
    if arguments.json:
        print_json({name: {"value": values[name], "source": sources[name]} for name in FIELDS})
    else:
        rows = [[name, text_of(name, values[name]) or '""', sources[name]] for name in FIELDS]
        print_table(["setting", "value", "from"], rows)
    return OK


def toml() -> str:
    """A file of settings: every default by group, each with its reason and bounds. Loading it gives the defaults."""
    lines = [
        "# Settings of a Postdate broker. Every value here is the default: change what you need, delete the rest.",
        "# Sizes are numbers of bytes or texts such as 64MiB, spans are milliseconds or texts such as 500ms, 30s, 7d.",
    ]
    for title, names in GROUPS.items():
        lines += ["", f"# -- {title} {'-' * (114 - len(title))}"]
        for name in names:
            field = FIELDS[name]
            low, high = field.metadata["low"], field.metadata["high"]
            bounds = "" if low is None else f" ({text_of(name, low)} to {text_of(name, high)})"
            # No default holds a character that TOML escapes.
            value = text_of(name, field.default)
            is_bare = isinstance(field.default, bool) or value.lstrip("-").isdecimal()
            value = value if is_bare else f'"{value}"'
            lines += ["", f"# {field.metadata['why']}{bounds}", f"{name} = {value}"]
    return "\n".join(lines) + "\n"
