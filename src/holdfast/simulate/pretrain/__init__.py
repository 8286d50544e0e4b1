"""Simulate pretraining jobs under virtual time, with failures, saves, restarts and people.

The decisions come from `recover.policy`, as in live runs. Time is attributed to the same causes as
in live runs.

| module | one idea |
|---|---|
| `causes` | why jobs fail and how often: Table 3 of the study, published rates, a user's own records |
| `scenario` | the job, saves, times, people and hardware; the presets `manual`, `study`, `holdfast` |
| `streams` | random draws that are the same in all variants of a scenario |
| `fleet` | nodes, spares, lemons (nodes that fail more often), heat waves, the repair shop |
| `progress` | computes the work and the saves between two events |
| `run` | simulates one run, event by event, under the live policy |
| `account` | assigns each second to one cause |
| `answers` | repeats a simulation; finds the best interval between saves and the spares needed |
| `plan` | advice for a user's next job, from the records of earlier ones |
| `plan_page` | the advice as an HTML page |
| `formulas` | closed forms that the simulator must agree with |
"""

from holdfast.simulate.pretrain.account import Outcome
from holdfast.simulate.pretrain.answers import (
    Answer,
    Band,
    best_interval,
    replicate,
    spares_needed,
)
from holdfast.simulate.pretrain.causes import TABLE3, Rates, own_rates, published, rates_named
from holdfast.simulate.pretrain.plan import Advice, Records, advise, prior_rates
from holdfast.simulate.pretrain.plan_page import write_plan
from holdfast.simulate.pretrain.run import run
from holdfast.simulate.pretrain.scenario import SCENARIOS, Scenario

__all__ = [
    "SCENARIOS",
    "TABLE3",
    "Advice",
    "Answer",
    "Band",
    "Outcome",
    "Rates",
    "Records",
    "Scenario",
    "advise",
    "best_interval",
    "own_rates",
    "prior_rates",
    "published",
    "rates_named",
    "replicate",
    "run",
    "spares_needed",
    "write_plan",
]
