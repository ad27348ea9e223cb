"""When should a test-time-training layer update its fast weights? A study as a pipeline."""

import os

# Noted before the long imports: a stage whose parent has ended by then must not begin.
PARENT = os.getppid()
