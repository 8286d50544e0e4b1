"""Own a sandbox with a running trial, announce it, and wait to be killed."""

import sys
import threading

from holdfast.evaluate.metrics.sandbox.sandbox import Limits, Sandbox

if __name__ == "__main__":
    box = Sandbox(1, Limits(wall_s=600.0), packages=False)
    threading.Thread(
        target=box.run,
        args=("import os, time\ndef f():\n    os.fork()\n    time.sleep(600)\n", "f()\n"),
        daemon=True,
    ).start()
    sys.stdout.write(f"{box.process_id()}\n")
    sys.stdout.flush()
    sys.stdin.read()
