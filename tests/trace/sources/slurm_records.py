"""Write records as `sacct --parsable2` prints them."""

from pathlib import Path

FIELDS = (
    "Cluster|JobIDRaw|JobID|User|Account|Partition|State|Submit|Start|End|ElapsedRaw|AllocTRES|ReqTRES|NodeList|"
    "ExitCode|Reason|JobName"
)
TRES = "billing=8,cpu=64,gres/gpu=8,mem=500G,node=1"


def record(
    job_id="7", shown="", state="COMPLETED", times=(100, 160, 400), alloc=TRES, req=TRES, **other
):
    submit, start, end = times
    cells = {
        "Cluster": "alpha", "JobIDRaw": job_id, "JobID": shown or job_id, "User": "ann", "Account": "lab",
        "Partition": "gpu", "State": state, "Submit": submit, "Start": start, "End": end, "ElapsedRaw": "240",
        "AllocTRES": alloc, "ReqTRES": req, "NodeList": "n[1-2]", "ExitCode": "0:0", "Reason": "None",
        "JobName": "train",
    }  # fmt: skip
    return "|".join(str(value) for value in (cells | other).values())


def write_records(folder: Path, *lines: str, header: str = FIELDS, name: str = "jobs.txt") -> Path:
    path = folder / name
    path.write_bytes("\n".join([header, *lines, ""]).encode("utf-8", "surrogateescape"))
    return path
