"""Record the results of tests in the ledger, and compute priors for the next session from them."""

from collections.abc import Iterable

from holdfast.core.ledger import Ledger, NodeRecord, Verdict
from holdfast.recover.localise.pairing import prior_of
from holdfast.recover.localise.session import Report


def priors_of(names: Iterable[str], known: Iterable[NodeRecord], now_s: float) -> dict[str, float]:
    """Return the prior of each node from earlier tests, which count less the older they are.

    Args:
        names: the names of the nodes to test.
        known: the nodes in the ledger.
        now_s: the present time, in Unix seconds.
    """
    records = {one.name: one for one in known}
    found = {}
    for name in names:
        record = records.get(name)
        probability = None if record is None else record.probability
        tested_at_s = None if record is None else record.tested_at_s
        found[name] = prior_of(probability, now_s - (tested_at_s or now_s))
    return found


def keep_verdicts(
    report: Report, ledger: Ledger, *, by: str, at_s: float, cordons: bool
) -> list[str]:
    """Record the verdicts of a report; return the names of the nodes that were cordoned.

    Args:
        report: the report of a session.
        ledger: the ledger for the records.
        by: the id of the run, or the name of the user, that started the session.
        at_s: the time of the verdicts, in Unix seconds.
        cordons: True to cordon bad nodes.

    Raises:
        LedgerError: the ledger cannot be written.
    """
    judgement = report.judgement
    cordoned = list(judgement.cordon) if cordons else []
    verdicts = [
        Verdict(
            name=name,
            outcome=outcome,
            probability=judgement.probabilities[name],
            evidence=f"{name} {report.evidence(name)}.",
            is_hard=name in report.hard,
            passed=report.passed(name),
        )
        for name, outcome in judgement.outcomes.items()
    ]
    ledger.add_verdicts(verdicts, at_s=at_s, by=by, cordons=cordoned)
    return cordoned
