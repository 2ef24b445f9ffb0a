"""`python -m billfish`."""

import sys

from billfish.cli import main

sys.exit(main())
