"""The command line with other limits: `python -m verify.faults.postdate up --limits '{"locks_max": 5}'`.

Limits are not settings, so no flag of `postdate up` changes them. The broker of a test needs small ones, so that files
are full and pauses end within seconds.
"""

import json
import sys

from postdate import cli
from postdate.config import Limits

if __name__ == "__main__":
    *words, flag, text = sys.argv[1:]
    assert flag == "--limits", f"expected --limits JSON as the last words, found {flag} {text}"
    sys.exit(cli.main(words, limits=Limits(**json.loads(text))))
