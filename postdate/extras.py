"""Optional parts of the package: what each extra brings, and the sentence for a command that lacks one."""

from importlib.util import find_spec

from postdate.errors import UsageError

# The libraries that stand for an extra. Spark's Python code also needs pandas, which pip installs with it.
LIBRARIES = {"table": ("pyarrow", "deltalake"), "spark": ("pyarrow", "deltalake", "pyspark")}


def has_extra(extra: str) -> bool:
    """Returns whether the libraries of an extra are installed. Loads none of them."""
    return all(find_spec(library) is not None for library in LIBRARIES[extra])


def require_extra(extra: str, what: str) -> None:
    """Raises UsageError with the way to install an extra, if it is missing. `what` is the subject of the sentence."""
    if not has_extra(extra):
        raise UsageError(f"{what} needs postdate[{extra}], which is not installed: {install(extra)}")


def install(extra: str) -> str:
    """Returns how an extra is installed, to be read after a colon."""
    return f"run pip install '.[{extra}]' in a clone of Postdate"
