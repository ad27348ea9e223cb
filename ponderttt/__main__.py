"""`python -m ponderttt`"""

import sys

from ponderttt.cli import main

# Processes that measure import this file again.
if __name__ == "__main__":
    sys.exit(main())
