"""Frameworks are large: their tests are collected only by ``make test-programs``, which installs them."""

import os

collect_ignore = [] if "GPUJOB_PROGRAMS" in os.environ else ["test_frameworks.py", "test_checkpoints.py"]
