"""`python -m billfish`."""

import sys

from billfish.cli.start import main

sys.exit(main())
