"""`python -m postdate` is the same as `postdate`."""

import sys

from postdate.cli import main

sys.exit(main())
