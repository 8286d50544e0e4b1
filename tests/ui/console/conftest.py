"""The tests of the console use the sample runs of the run report."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))
