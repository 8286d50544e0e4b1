"""Makes the pictures of README.md and docs/ from real pages, and photographs the pages.

Needs Chromium (Debian: apt-get install chromium).
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
HOLDFAST = (sys.executable, "-m", "holdfast.cli.main")
WIDTH = 1100


def demonstration(folder: Path) -> Path:
    """The page of a run that survived."""
    out = folder / "demo-report"
    subprocess.run([*HOLDFAST, "demo", "--seed", "0", "--out", str(out)], check=True)
    return out / "report.html"


def characterization(folder: Path) -> Path:
    """The page of the twins of Seren and Kalos."""
    arguments = []
    for name in ("seren", "kalos"):
        twin = folder / name
        subprocess.run(
            [*HOLDFAST, "trace", "twin", "--like", name, "-o", twin, "--telemetry", "2000"],
            check=True,
        )
        arguments += [
            str(twin / f"trace_{name}.csv"),
            "--metrics",
            f"{name.title()}-SYNTHETIC={twin / 'utilization' / name}",
        ]
        arguments += ["--reasons", f"{name.title()}-SYNTHETIC={twin / f'reasons_{name}.csv'}"]
    out = folder / "trace-report"
    subprocess.run(
        [*HOLDFAST, "trace", "report", *arguments, "--durations", "released", "-o", out], check=True
    )
    return out / "index.html"


def profile(folder: Path) -> Path:
    """The page of a synthetic 123B job in two layouts."""
    subprocess.run([sys.executable, "-m", "holdfast.profile.synthetic", folder], check=True)
    report = ["profile", "report", str(folder / "3d"), "--compare", str(folder / "zero")]
    subprocess.run([*HOLDFAST, *report], check=True)
    return folder / "3d" / "profile.html"


PICTURES = {
    # Down to the time line; the incidents, with their cited lines, and the proof come below.
    "report.png": (demonstration, 1260),
    # The answer, what was read, what the checks found, and the first findings.
    "trace.png": (characterization, 1260),
    # The answer, the two layouts side by side, and the activity of each stage.
    "profile.png": (profile, 1500),
}
"""Picture, its page, and how far down it goes."""


def photograph(page: Path, picture: Path, height: int, chromium: str, folder: Path) -> None:
    """Render the top of a page."""
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
        f"--window-size={WIDTH},{height}",
        f"--screenshot={picture}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        page.as_uri(),
    ]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=120)


def main() -> None:
    """Make the pictures named on the command line, or all, and leave them beside this file."""
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if chromium is None:
        sys.exit("This needs Chromium: apt-get install chromium")
    for name in sys.argv[1:] or PICTURES:
        make, height = PICTURES[name]
        with tempfile.TemporaryDirectory() as folder:
            photograph(make(Path(folder)), HERE / name, height, chromium, Path(folder))


if __name__ == "__main__":
    main()
