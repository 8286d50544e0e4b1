"""Run work in a fork of the test's process, which has imported what the work needs.

A new process would import torch again, which takes seconds of a core.
"""

import multiprocessing

from waiting import ENDS_S

FORKS = multiprocessing.get_context("fork")


def exit_code_of(work, *arguments, **named):
    """Run `work` in a fork to its end; return the exit code, which is negative after a signal."""
    fork = FORKS.Process(target=work, args=arguments, kwargs=named)
    fork.start()
    fork.join(ENDS_S)
    try:
        assert fork.exitcode is not None, "it does not end"
    finally:
        fork.kill()
        fork.join()
    return fork.exitcode
