"""Makes docs/images/report.png, the picture in README.md: runs the demonstration and photographs its page.

Needs Chromium (Debian: apt-get install chromium).
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).with_name("report.png")
WIDTH, HEIGHT = 1100, 1260
"""Down to the time line; the incidents, with their cited lines, and the proof come below."""


def main() -> None:
    """Run, render, and leave the picture beside this file."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("This needs Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "demo-report"
        demo = [sys.executable, "-m", "holdfast.cli.main", "demo", "--seed", "0", "--out", str(out)]
        subprocess.run(demo, check=True)
        command = [
            chromium,
            "--headless",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
            "--force-device-scale-factor=1.5",
            f"--user-data-dir={folder}/profile",
            f"--window-size={WIDTH},{HEIGHT}",
            f"--screenshot={PICTURE}",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            (out / "report.html").as_uri(),
        ]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=120)


if __name__ == "__main__":
    main()
