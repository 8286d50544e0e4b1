"""Compute energy and emissions by month from measured power (study: appendix)."""

from typing import TYPE_CHECKING

import numpy as np

from holdfast.core import words
from holdfast.trace.analyses.measured import measured, sentences
from holdfast.trace.analyses.power import STUDY_SHARES
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.analyses.selection import slug
from holdfast.trace.charts import Axis, Bars, Figure
from holdfast.trace.errors import LeftOut
from holdfast.trace.table import Table

if TYPE_CHECKING:
    from holdfast.trace.trace import Trace

PUE = 1.25
"""Power usage effectiveness of the study's datacenter: facility energy divided by computer energy.
"""
CARBON_FREE_SHARE = 0.3061
"""Share of the study's electricity from carbon-free sources."""
INTENSITY_T_PER_MWH = 0.478
"""Tonnes of CO2-equivalent per MWh of the study's electricity, averaged over all its sources."""


def emissions_t(
    energy_mwh: float, *, intensity_t_per_mwh: float = INTENSITY_T_PER_MWH, pue: float = 1.0
) -> float:
    """Return the tonnes of CO2-equivalent emitted for an amount of energy.

    The formula follows from the study's numbers for Seren in May 2023: 321.7 t for 673 MWh is 673 x
    0.478. The study therefore applies neither the PUE of 1.25 nor the carbon-free share of 30.61%.
    The carbon-free share must not be subtracted, because the intensity is an average over all
    sources. The 673 MWh are the energy of the computers and not of the facility, because 286 GPU
    servers at their mean of 2,930 W use 624 MWh in a month of 31 days.

    Args:
        energy_mwh: energy in MWh.
        intensity_t_per_mwh: tonnes per MWh, averaged over all sources.
        pue: facility energy divided by computer energy. Give 1 if `energy_mwh` is the energy of the
            facility, or to count as the study does.
    """
    return energy_mwh * pue * intensity_t_per_mwh


def energy_by_month(
    trace: "Trace",
    *,
    pue: float = PUE,
    carbon_free_share: float = CARBON_FREE_SHARE,
    intensity_t_per_mwh: float = INTENSITY_T_PER_MWH,
    gpu_share: float = STUDY_SHARES["GPUs"],
) -> Result:
    """Chart energy and emissions of each UTC month, with and without the PUE.

    The study counts without the PUE. The energy of an hour is the mean power of its samples times
    the number of devices. The power of servers is used (GPU_SERVER_POWER and CPU_SERVER_POWER) if
    measured, else the power of GPUs (POWER_USAGE) divided by `gpu_share`. Hours without samples
    count as no energy; the caption gives their number.

    Args:
        trace: a trace with at least one of these metrics.
        pue: facility energy divided by computer energy.
        carbon_free_share: carbon-free share of the electricity, 0 to 1. It is used for the
            carbon-free energy and not for emissions.
        intensity_t_per_mwh: tonnes of CO2-equivalent per MWh.
        gpu_share: GPUs' share of a server's power, 0 to 1; used if servers are not measured.

    Raises:
        LeftOut: the trace has no telemetry of power.
    """
    hours = measured(trace, "metric_hours")
    devices = measured(trace, "metric_devices")
    rows, numbers, captions = [], {}, {}
    bars: dict[str, float] = {}
    for cluster in dict.fromkeys(hours["cluster"].tolist()):
        present = set(hours.where(cluster=cluster)["metric"].tolist())
        servers = sorted(present & {"GPU_SERVER_POWER", "CPU_SERVER_POWER"})
        metrics = servers or sorted(present & {"POWER_USAGE"})
        if not metrics:
            continue
        whole = 1.0 if servers else gpu_share
        energy: dict[np.datetime64, float] = {}
        covered: dict[np.datetime64, int] = {}
        for metric in metrics:
            own = hours.where(cluster=cluster, metric=metric)
            number = len(np.unique(devices.where(cluster=cluster, metric=metric)["device"]))
            energy_mwh = own["sum_value"] / own["n"] * number / whole / 1e6
            in_month = own["hour"].astype("datetime64[M]")
            for month in np.unique(in_month):
                energy[month] = energy.get(month, 0.0) + float(energy_mwh[in_month == month].sum())
                covered[month] = max(covered.get(month, 0), int((in_month == month).sum()))
        for month in sorted(energy):
            it_mwh = energy[month]
            tonnes = emissions_t(it_mwh, intensity_t_per_mwh=intensity_t_per_mwh)
            energies_mwh = (it_mwh, pue * it_mwh, pue * it_mwh * carbon_free_share)
            rows.append((cluster, str(month), covered[month], *energies_mwh, tonnes, pue * tonnes))
            numbers[f"{slug(cluster)}.energy.{month}.it_mwh"] = it_mwh
            numbers[f"{slug(cluster)}.carbon.{month}.t_co2e"] = tonnes
            bars[f"{cluster} {month}"] = it_mwh
        total = sum(energy.values())
        tonnes = emissions_t(total, intensity_t_per_mwh=intensity_t_per_mwh)
        numbers[f"{slug(cluster)}.energy.it_mwh"] = total
        numbers[f"{slug(cluster)}.carbon.t_co2e"] = tonnes
        numbers[f"{slug(cluster)}.carbon.t_co2e_per_mwh"] = intensity_t_per_mwh
        numbers[f"{slug(cluster)}.carbon.t_co2e_with_pue"] = pue * tonnes
        how = "servers" if servers else f"GPUs, over their share of {gpu_share:.0%} of a server"
        captions[cluster] = (
            f"{total:,.1f} MWh in {words.plainly(sum(covered.values()), 'hour')} with samples (power of {how}), "
            f"{tonnes:,.1f} t CO2e "
            f"as the study counts, {pue * tonnes:,.1f} t with the PUE of {pue:g}"
        )
    if not rows:
        raise LeftOut(
            "Left out: the telemetry has no power (GPU_SERVER_POWER, CPU_SERVER_POWER, "
            "POWER_USAGE)."
        )
    columns = (
        "cluster",
        "month",
        "hours_with_samples",
        "it_energy_mwh",
        "facility_energy_mwh",
        "carbon_free_mwh",
        "emissions_t_co2e",
        "emissions_with_pue_t_co2e",
    )
    chart = Bars(
        title="Energy by month",
        value=Axis(label="energy of the computers (MWh)", low=0.0),
        groups=list(bars),
        parts={"energy": np.array(list(bars.values()))},
    )
    return Result(
        table=Table.of_rows(columns, rows),
        chart=Figure(panels=[chart], columns=1),
        caption=f"{sentences(captions)} {intensity_t_per_mwh:g} t a MWh, {carbon_free_share:.2%} of it "
        "carbon-free already "
        "in that figure.",
        numbers=numbers,
    )


ANALYSES = (
    Analysis(
        name="energy_by_month",
        section="Power, heat and carbon",
        title="Energy and emissions",
        run=energy_by_month,
        source="Appendix",
    ),
)
