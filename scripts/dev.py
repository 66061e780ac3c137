#!/usr/bin/env python3
"""One command for each thing a developer does; see `python3 scripts/dev.py --help`.

Needs nothing but Python. This file is kept to syntax that every Python understands, so
that an unsuitable one gets an explanation instead of a traceback.
"""

import platform
import sys

python = platform.python_implementation() + " " + platform.python_version()
if not (3, 11) <= sys.version_info[:2] <= (3, 14) or not python.startswith("CPython"):
    sys.stderr.write(
        "error: this needs CPython 3.11, 3.12, 3.13 or 3.14, and this is "
        + python
        + ".\n"
        "Start it with another interpreter, for example: python3.11 "
        + " ".join(sys.argv)
        + "\n"
    )
    sys.exit(1)

from commands import main

sys.exit(main())
