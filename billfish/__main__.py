"""`python -m billfish`."""

import sys

from billfish.cli.main import main

sys.exit(main())
