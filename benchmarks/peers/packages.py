"""Client libraries of the peers, from PyPI, in a folder outside the tree: python -m benchmarks.peers.packages

They are no dependencies of this project and not in its environment: nobody who works on it needs them, and what they
bring along must not decide which versions it gets. Only the processes that measure have this folder on their path.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements.txt"
CACHE_NAME = "POSTDATE_PEERS_CACHE"


def folder() -> Path:
    cache = Path(os.environ.get(CACHE_NAME) or Path.home() / ".cache" / "postdate" / "peers")
    return cache / f"python{sys.version_info.major}.{sys.version_info.minor}"


def environment() -> dict[str, str]:
    """This one, with the folder behind all other places."""
    site = folder()
    own = dict(os.environ)
    own["PYTHONPATH"] = os.pathsep.join(filter(None, (own.get("PYTHONPATH"), str(site))))
    own["PATH"] = os.pathsep.join((own.get("PATH", os.defpath), str(site / "bin")))
    return own


def install() -> None:
    """Nothing is fetched again while the list stays the same."""
    site = folder()
    stamp, wanted = site / "stamp", hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    shutil.rmtree(site, ignore_errors=True)
    print(f"fetching the peers' Python clients into {site} ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(site)]
    subprocess.run([*command, "--requirement", str(REQUIREMENTS)], check=True)
    stamp.write_text(wanted)


if __name__ == "__main__":
    install()
