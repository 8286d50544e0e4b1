"""List every analysis of the report, in order, with the assumptions that they need."""

from dataclasses import dataclass, replace
from functools import partial

from holdfast.trace.analyses import (
    SECTIONS,
    arrivals,
    capacity,
    carbon,
    demand,
    durations,
    failure_rates,
    failures,
    fragmentation,
    heat,
    idle,
    joined,
    losses,
    months,
    nodes,
    outcomes,
    power,
    progress,
    queues,
    summary,
    users,
    utilisation,
    waiting,
    workloads,
)
from holdfast.trace.analyses.result import Analysis

_MODULES = (
    summary, months, workloads, demand, durations, arrivals, capacity, fragmentation, queues, waiting, outcomes,
    failures, losses, failure_rates, progress, nodes, utilisation, idle, joined, power, heat, carbon, users,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Set values that some analyses need and no trace contains; the defaults are the study's."""

    pue: float = carbon.PUE
    """Power usage effectiveness: facility energy divided by computer energy."""
    carbon_free_share: float = carbon.CARBON_FREE_SHARE
    """Carbon-free share of the electricity, 0 to 1."""
    intensity_t_per_mwh: float = carbon.INTENSITY_T_PER_MWH
    """Tonnes of CO2-equivalent per MWh, averaged over all sources of the grid."""

    def in_words(self) -> dict[str, str]:
        """Return name and value of each assumption as text, for the report's notes on methods."""
        return {
            "Power usage effectiveness (PUE)": f"{self.pue:g}",
            "Carbon-free share of the electricity": f"{self.carbon_free_share:.2%}",
            "Intensity of the grid": f"{self.intensity_t_per_mwh:g} tCO2e/MWh",
        }


def catalogue(assumptions: Assumptions | None = None) -> tuple[Analysis, ...]:
    """Return the analyses, section by section."""
    assumed = assumptions or Assumptions()
    energy = partial(
        carbon.energy_by_month,
        pue=assumed.pue,
        carbon_free_share=assumed.carbon_free_share,
        intensity_t_per_mwh=assumed.intensity_t_per_mwh,
    )
    analyses = [analysis for module in _MODULES for analysis in module.ANALYSES]
    analyses = [
        replace(one, run=energy) if one.run is carbon.energy_by_month else one for one in analyses
    ]
    return tuple(sorted(analyses, key=lambda analysis: SECTIONS.index(analysis.section)))
