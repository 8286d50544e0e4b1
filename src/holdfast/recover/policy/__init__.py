"""Decide what to do next: a pure function over an explicit table.

`decide(limits, state, event, now_s) -> (state, actions)`. The supervisor passes on each event and
carries the actions out; the function runs in the same way under a virtual clock. `TABLE` holds all
the rules: a pair of phase and event that is not in the table changes nothing. `events` and `state`
define the input and the output; `history` counts gains; `nodes` decides about single nodes.

If a node must be left, the ranks save their state, and the next attempt begins on other nodes. The
time for that follows from the longest save of the run, since a kill would lose the steps since the
last checkpoint.

A broken loss ends the attempt. The next attempt goes on from a healthy checkpoint and runs the same
steps again, on other ranks where it can (a replay, see `replay.classes`). If the loss breaks again
with the same numbers, the attempt after that leaves out the batches that led to the loss, if the
ranks report them (`skipping.plan`). If no more batches can
be left out, a spike of the loss that comes again at about the same step is caused by the data or
the settings. The training then goes on from the spike, as it does if there is no healthy
checkpoint. A loss that is not finite again, at the same step or before a newer checkpoint was
healthy, ends the run.

The job is restarted if three conditions hold: the diagnosis finds that a restart helps, the budget
is not spent, and the same root has not struck at the same place since the last gain. There are two
places: before and after the first step of an attempt. The budget counts the restarts in a row that
gained nothing; a run that gains goes on for ever. The first restart after a gain is immediate; each
further restart waits twice as long as the one before. Three kinds of root may strike a few times
without a gain: a cause outside the job (storage, network), since waiting can mend it; a kill from
outside, since two kills can hit one stretch between checkpoints; and any root of a job that reports
neither steps nor checkpoints, since the gains of that job cannot be seen.
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
    NodesBack,
    NodesMissing,
    NodeToLeave,
    RankFailed,
    Replay,
    Resolve,
    RollbackAsked,
    Saved,
    StateSaved,
    StopAsked,
    Terminate,
    Tick,
)
from holdfast.recover.policy.history import after_failure
from holdfast.recover.policy.nodes import Around, plan_for
from holdfast.recover.policy.state import Phase, RestartLimits, State, move_grace_s
from holdfast.recover.policy.table import TABLE, decide, finish, rule_of
from holdfast.recover.skipping.plan import Skip

__all__ = [
    "TABLE",
    "Action",
    "Adopted",
    "Around",
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
    "NodeToLeave",
    "NodesBack",
    "NodesMissing",
    "Phase",
    "RankFailed",
    "Replay",
    "Resolve",
    "RestartLimits",
    "RollbackAsked",
    "Saved",
    "Skip",
    "State",
    "StateSaved",
    "StopAsked",
    "Terminate",
    "Tick",
    "after_failure",
    "decide",
    "finish",
    "move_grace_s",
    "plan_for",
    "rule_of",
]
