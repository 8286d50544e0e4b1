"""Decide what to do next: a pure function over an explicit table.

`decide(limits, state, event) -> (state, actions)`. The supervisor passes on what happened, and carries the actions out;
the function runs in the same way under a virtual clock. `TABLE` is the whole of it: a pair of phase and event that is
not there changes nothing. `events` and `state` define what goes in and comes out, `history` counts gains.

A broken loss ends the attempt: the next one goes on from a healthy checkpoint, and leaves out the batches that led to
the loss, where the ranks report them (`skipping.plan`). Where no more batches are left out, a spike of the loss that
comes again about the same step comes from the data or the settings: the training goes on from there, as where there is
no healthy checkpoint; and a loss that is not finite again, at the same step or before a newer checkpoint was healthy,
ends the run.

A restart is worth it when the diagnosis says so, the budget is not spent, and the same root did not already strike
since something was gained last, at the same place: before an attempt's first step, or after it. The budget counts the
restarts in a row that gained nothing; a run that gains goes on for ever. The first restart after a gain is immediate;
each further one waits twice as long as the one before. What lies outside the job (storage, network) may strike a few
times without a gain, since waiting can mend it; so may a kill from outside, since two kills can hit one stretch between
checkpoints; and so may any root of a job that reports neither steps nor checkpoints, since its gains cannot be seen.
"""

from holdfast.recover.policy.events import (
    Action,
    Adopted,
    AskRanksToSave,
    Begin,
    CannotSave,
    Diagnose,
    Diagnosed,
    End,
    Event,
    JobExited,
    JobFrozen,
    Kill,
    Launch,
    LossBroken,
    NodesMissing,
    RankFailed,
    Resolve,
    StateSaved,
    StopAsked,
    Terminate,
    Tick,
)
from holdfast.recover.policy.history import after_failure
from holdfast.recover.policy.state import Phase, RestartLimits, State
from holdfast.recover.policy.table import TABLE, decide, finish, rule_of

__all__ = [
    "TABLE",
    "Action",
    "Adopted",
    "AskRanksToSave",
    "Begin",
    "CannotSave",
    "Diagnose",
    "Diagnosed",
    "End",
    "Event",
    "JobExited",
    "JobFrozen",
    "Kill",
    "Launch",
    "LossBroken",
    "NodesMissing",
    "Phase",
    "RankFailed",
    "Resolve",
    "RestartLimits",
    "State",
    "StateSaved",
    "StopAsked",
    "Terminate",
    "Tick",
    "after_failure",
    "decide",
    "finish",
    "rule_of",
]
