"""Keep a run going: restart its job after failures, and stop the run with its state saved.

The input is a command with its options (`RunSpec`). The output is an `Outcome`, and the history of
the run in the ledger.

The modules, in the order in which a run uses them:

1. `spec`: the command and the options of its supervision; `runs`: begins, joins, resumes, stops and
   removes a run
2. `agent`: one node's part of a run; `launching`: starts the processes of the job. The chain of
   processes is `guard` → torchrun → one `shim` per rank → the user's command.
3. `attach`: sends the reports of the user's script over `channel` to the agent of its node; the
   agent forwards them to `nodes` in the supervisor
4. `attempt`: the facts known about an attempt; `detectors`: find faults of a running job; `stacks`:
   reads the stacks of ranks; `gate`: finds healthy checkpoints; `stopping`: agrees on the step at
   which all ranks stop
5. `policy`: decides on the next action, as a pure function
6. `people`: records decisions, waits for a person's approval if needed, and sends messages about
   incidents
7. `signals`: reads the health of each node on the node itself; `localise`: finds the faulty node by
   tests
8. `slurm`: queues a run as a Slurm job, and queues it again when nodes are missing
9. `conduct`: carries out the actions; `supervisor`: the event loop, in a separate process
   (`supervisor_process`)
"""

from typing import TYPE_CHECKING, Any

from holdfast.recover.attach import Run, attach

if TYPE_CHECKING:
    from holdfast.recover.agent.board import Board, board_of
    from holdfast.recover.agent.rendezvous import Meeting, meeting_of
    from holdfast.recover.detectors.hang import HangLimits
    from holdfast.recover.localise.across import Joined, check_nodes, check_this_host
    from holdfast.recover.localise.session import Report
    from holdfast.recover.localise.verdicts import keep_verdicts, priors_of
    from holdfast.recover.outcome import Outcome
    from holdfast.recover.people.modes import MODES
    from holdfast.recover.people.rollback import healthy_steps, roll_back_run
    from holdfast.recover.people.sender import check_urls
    from holdfast.recover.runs import (
        approve_run,
        begin_run,
        change_options,
        default_stem,
        detach,
        join,
        remove_run,
        state_of,
        state_on_this_host,
        stop_run,
        supervise,
    )
    from holdfast.recover.signals.gpu.gpus import Gpus
    from holdfast.recover.signals.host import clock_is_synchronised
    from holdfast.recover.slurm.following import Following
    from holdfast.recover.slurm.submission import (
        Submission,
        is_left,
        new_submission,
        settle_jobs,
        stop_queued,
        submit_run,
    )
    from holdfast.recover.spec import RunSpec

__all__ = [
    "MODES",
    "Board",
    "Following",
    "Gpus",
    "HangLimits",
    "Joined",
    "Meeting",
    "Outcome",
    "Report",
    "Run",
    "RunSpec",
    "Submission",
    "approve_run",
    "attach",
    "begin_run",
    "board_of",
    "change_options",
    "check_nodes",
    "check_this_host",
    "check_urls",
    "clock_is_synchronised",
    "default_stem",
    "detach",
    "healthy_steps",
    "is_left",
    "join",
    "keep_verdicts",
    "meeting_of",
    "new_submission",
    "priors_of",
    "remove_run",
    "roll_back_run",
    "settle_jobs",
    "state_of",
    "state_on_this_host",
    "stop_queued",
    "stop_run",
    "submit_run",
    "supervise",
]

_HOMES = {
    "MODES": "people.modes",
    "Gpus": "signals.gpu.gpus",
    "HangLimits": "detectors.hang",
    "Joined": "localise.across",
    "Report": "localise.session",
    "check_nodes": "localise.across",
    "check_this_host": "localise.across",
    "keep_verdicts": "localise.verdicts",
    "priors_of": "localise.verdicts",
    "Board": "agent.board",
    "Meeting": "agent.rendezvous",
    "Outcome": "outcome",
    "RunSpec": "spec",
    "approve_run": "runs",
    "begin_run": "runs",
    "board_of": "agent.board",
    "change_options": "runs",
    "check_urls": "people.sender",
    "healthy_steps": "people.rollback",
    "roll_back_run": "people.rollback",
    "clock_is_synchronised": "signals.host",
    "default_stem": "runs",
    "detach": "runs",
    "join": "runs",
    "meeting_of": "agent.rendezvous",
    "remove_run": "runs",
    "state_of": "runs",
    "state_on_this_host": "runs",
    "stop_run": "runs",
    "supervise": "runs",
    "Following": "slurm.following",
    "Submission": "slurm.submission",
    "settle_jobs": "slurm.submission",
    "is_left": "slurm.submission",
    "new_submission": "slurm.submission",
    "stop_queued": "slurm.submission",
    "submit_run": "slurm.submission",
}


def __getattr__(name: str) -> Any:
    # Lazy: a rank that attaches needs neither the ledger nor the diagnosis.
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.recover' has no attribute {name!r}")
    return getattr(import_module(f"holdfast.recover.{_HOMES[name]}"), name)
