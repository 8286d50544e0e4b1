"""Decide what to do next, by a pure function over an explicit table.

The function is `decide(limits, state, event, now_s) -> (state, actions)`. The supervisor calls it
with each event and carries out the returned actions; simulations call it under a virtual clock.
`TABLE` contains all rules. If it has no rule for a pair of phase and event, nothing changes.
`events` and `state` define the input and the output; `history` counts gains; `nodes` decides about
single nodes.

If the job must leave a node, the ranks save their state, and the next attempt starts on other
nodes. The time limit for this save follows from the longest save of the run. It is generous, since
a kill would lose the steps since the last checkpoint.

A broken loss ends the attempt. The next attempt is a replay: it continues from a healthy checkpoint
and runs the same steps again, if possible with each rank on another node or GPU (see
`replay.classes`). If the loss breaks again with the same numbers, the following attempt leaves out
the batches that led to the broken loss, if the ranks report batches (see `skipping.plan`). If no
more batches can be left out, the loss breaks because of the data or the settings. Then a spike of
the loss at about the same step is accepted, and training continues from the spike; the same is done
if there is no healthy checkpoint. If the loss is not finite again, at the same step or before a
newer checkpoint was healthy, the run ends. The first step of the next attempt shows if the job went
back. If it continues from a newer state than the rollback left, the run ends at the next broken
loss that is not finite, since another rollback would not help either, and accepts a spike.

After a failure, the job is restarted if three conditions hold: the diagnosis finds that a restart
helps, the budget is not spent, and the same root has not struck at the same place since the last
gain. A gain is progress of the run (see `history`). There are two places: before and after the
first step of an attempt. The budget limits the number of consecutive restarts without a gain, so a
run that makes progress is never stopped by it. The first restart after a gain is immediate; each
further restart waits twice as long as the one before.

Three kinds of root may strike a few times without a gain:

- a cause outside the job, such as storage or network, since it may end by itself; while probes show
  that it lasts, the restart is put off
- a kill from outside, since two kills can come between the same two checkpoints
- any root in a job that reports neither steps nor checkpoints, since its gains cannot be seen
"""

from holdfast.recover.policy.events import (
    Action,
    Adopted,
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
    OutageLasts,
    OutageOver,
    RankFailed,
    Replay,
    RequestFinalSave,
    Resolve,
    RollbackMissed,
    RollbackRequested,
    Saved,
    StateSaved,
    StopRequested,
    Terminate,
    Tick,
)
from holdfast.recover.policy.history import after_failure
from holdfast.recover.policy.nodes import Circumstances, plan_for
from holdfast.recover.policy.state import Phase, RestartLimits, State, move_grace_s
from holdfast.recover.policy.table import RESTORE, TABLE, decide, finish, rule_of
from holdfast.recover.skipping.plan import Skip

__all__ = [
    "RESTORE",
    "TABLE",
    "Action",
    "Adopted",
    "Begin",
    "CannotSave",
    "Circumstances",
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
    "OutageLasts",
    "OutageOver",
    "Phase",
    "RankFailed",
    "Replay",
    "RequestFinalSave",
    "Resolve",
    "RestartLimits",
    "RollbackMissed",
    "RollbackRequested",
    "Saved",
    "Skip",
    "State",
    "StateSaved",
    "StopRequested",
    "Terminate",
    "Tick",
    "after_failure",
    "decide",
    "finish",
    "move_grace_s",
    "plan_for",
    "rule_of",
]
