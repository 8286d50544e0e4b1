"""Simulate pretraining jobs: failures, saves, restarts and people under virtual time.

The policy of `recover` decides, and the account has the classes of live runs.

| module | one idea |
|---|---|
| `causes` | why jobs fail and how often: Table 3, published rates, a user's own records |
| `scenario` | the job, its saves, the times, the people, the hardware; `manual`, `study`, `holdfast` |
| `streams` | random draws that depend on their purpose alone |
| `fleet` | nodes, spares, lemons, heat waves, the repair shop |
| `progress` | work and saves between two events, by arithmetic |
| `run` | one run, event by event, under the live policy |
| `account` | each second given to one cause |
| `answers` | replications, the best interval, the spares needed |
| `plan` | advice for a user's next job, from the records of earlier ones |
| `plan_page` | the same as a page |
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
