"""Guess the origin of a file that no adapter reads, and name a command that exports a readable one.

The first lines of a file show, for example, that it is a table formatted for people, a snapshot of
a queue, or text in another encoding. A guess may be wrong, so its message only states what the file
looks like.
"""

import csv
import json
import re
import shlex
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.trace.sources.plain_text import head, opened

UNKNOWN_FORM: Final = "The format of these job records is not recognised."
SACCT: Final = (
    "SLURM_TIME_FORMAT=%s sacct --allusers --allocations --duplicates --parsable2 --starttime "
    "2024-01-01 --format "
    "Cluster,JobIDRaw,JobID,User,Account,Partition,State,Submit,Start,End,ElapsedRaw,AllocTRES,ReqTRES,NodeList,"
    "ExitCode,Reason,JobName > jobs.txt"
)
KUBECTL: Final = "kubectl get pods,jobs --all-namespaces -o json > pods.json"
PBS: Final = "cat $PBS_HOME/server_priv/accounting/2024* > pbs.txt"
LSF: Final = "cat $LSB_SHAREDIR/CLUSTER/logdir/lsb.acct* > lsf.txt"
SGE: Final = (
    'awk -F: \'BEGIN {print "job_id,user,queue,submitted,started,ended,exit_status,category"}'
    ' !/^#/ {gsub(/,/, ";", $40);'
    ' print $6 "," $4 "," $1 "," $9 "," $10 "," $11 "," $13 "," $40}\' accounting > jobs.csv'
)
CONDOR: Final = (
    "(echo job_id,user,gpus,submitted,started,ended,status; condor_history -format '%d.' ClusterId "
    "-format '%d,' ProcId"
    " -format '%s,' Owner -format '%d,' RequestGpus -format '%d,' QDate -format '%d,' "
    "JobCurrentStartDate"
    " -format '%d,' CompletionDate -format '%d\\n' JobStatus) > jobs.csv"
)
_MAPPED: Final = ", and describe its columns by --map (docs/trace.md)"


@dataclass(frozen=True)
class Guess:
    """The likely origin of a file, and the command that exports a readable file."""

    what: str
    command: str
    after: str = ""
    """Further steps after the command, as text."""


_TABLES: Final[tuple[tuple[str, Guess], ...]] = (
    (r"\s*JobID\S*\s+.*\n\s*-{4,}\s", Guess("sacct's default table", SACCT)),
    (r"\s*\d+[\d_.+\[\]%-]*(\.\w+)?\s+\S+\s.*\b(COMPLETED|FAILED|RUNNING|PENDING|TIMEOUT|CANCELLED\+?)\b\s+\d+:\d+\s*$",
     Guess("sacct's default table without its header", SACCT)),
    (r"JobId=\d+ (ArrayJobId=\d+ )?.*(JobName|UserId)=|JobId=\d+\s", Guess("what `scontrol show job` prints", SACCT)),
    (r"\s*JOBID\s+PARTITION\s+NAME", Guess("what `squeue` prints", SACCT)),
    (r"[^\n|]*\|.*\|(COMPLETED|FAILED|RUNNING|PENDING|TIMEOUT|CANCELLED[^|]*|NODE_FAIL|OUT_OF_MEMORY)\|",
     Guess("what `sacct --parsable2 --noheader` prints, which does not name its fields", SACCT)),
    (r"(NAMESPACE\s+)?NAME\s+READY\s+STATUS\s+RESTARTS", Guess("what `kubectl get pods` prints", KUBECTL)),
    (r"(NAMESPACE\s+)?NAME\s+(STATUS\s+)?COMPLETIONS\s+DURATION", Guess("what `kubectl get jobs` prints", KUBECTL)),
    (r"Name:\s+\S+\nNamespace:\s", Guess("what `kubectl describe` prints", KUBECTL)),
    (r"\s*JOBID\s+USER\s+STAT\s+QUEUE", Guess("what LSF's `bjobs` prints", LSF)),
    (r"\s*Job <\d+>|Summary of time in seconds|Accounting information about jobs",
     Guess("what LSF's `bacct`, `bhist` or `bjobs -l` prints", LSF)),
    (r"Job [Ii][Dd]\s+Name\s+User|\s*Req'd\s+Req'd|Job Id: ", Guess("what PBS' `qstat` prints", PBS)),
    (r"job-ID\s+prior\s+name", Guess("what Grid Engine's `qstat` prints", SGE, _MAPPED)),
    (r"={20,}\nqname\s", Guess("what Grid Engine's `qacct -j` prints", SGE, _MAPPED)),
    (r"(#.*\n)*[^:\n]+:[^:\n]+:[^:\n]+:[^:\n]+:[^:\n]*:\d+:(sge|[^:\n]+):\d+:\d{9,13}:\d+:\d+:",
     Guess("the accounting file of Grid Engine", SGE, _MAPPED)),
    (r"\s*ID\s+OWNER\s+SUBMITTED\s+RUN_TIME", Guess("what HTCondor's `condor_history` prints", CONDOR, _MAPPED)),
    (r"\s*\d{3} \(\d+\.\d+\.\d+\) ", Guess("the event log of an HTCondor job", CONDOR, _MAPPED)),
)  # fmt: skip
_FIRST_LINES: Final = tuple((re.compile(form, re.MULTILINE), guess) for form, guess in _TABLES)
_TEXTS: Final[tuple[tuple[str, Guess], ...]] = (
    (r'"job_state"', Guess("what `squeue --json` or `scontrol --json` prints, which has no history", SACCT)),
    (r'\b(ClusterId|GlobalJobId|JobStatus)"?\s*[=:]', Guess("ClassAds of HTCondor", CONDOR, _MAPPED)),
    (r'"JOBS"\s*:\s*\[|"RECORDS"\s*:\s*\[', Guess("what LSF's `bjobs -json` prints", LSF)),
    (r'"pbs_version"|"Resource_List"', Guess("what PBS' `qstat -F json` prints", PBS)),
    (r'"?kind"?\s*:\s*"?[A-Z]\w*"?[\s\S]*"?metadata"?\s*:|"?apiVersion"?\s*:',
     Guess("Kubernetes objects that are neither pods nor Jobs", KUBECTL)),
)  # fmt: skip
_ANYWHERE: Final = tuple((re.compile(form), guess) for form, guess in _TEXTS)


def guess_of(path: Path) -> Guess | None:
    """Return the likely origin of a file; None if nothing matches."""
    try:
        with opened(path) as file:
            first = file.read(8192)
    except (OSError, EOFError, zlib.error):  # truncated or unreadable
        return None
    if first.startswith((b"\xff\xfe", b"\xfe\xff")) or (
        first and first.count(b"\0") > len(first) // 4
    ):
        command = f"iconv -f UTF-16 -t UTF-8 {_quoted(path)} > {_quoted(f'{path.stem}-utf8{path.suffix}')}"
        return Guess("a text in UTF-16, as PowerShell writes", command)
    text = head(path, 65536).lstrip("\ufeff").replace("\r\n", "\n")
    for form, guess in _FIRST_LINES:
        if form.match(text):
            return guess
    for form, guess in _ANYWHERE:
        if form.search(text):
            return guess
    for look in (_json_lines, _csv):
        if found := look(path, text):
            return found
    return None


def next_step_for(path: Path) -> str:
    """Return the next step for a file that no adapter reads."""
    guess = guess_of(path) if path.is_file() else None
    if guess is None:
        return (
            "Describe its columns by --map, or look at `holdfast trace formats` for the known "
            "formats."
        )
    verb = "Convert" if _quoted(path) in guess.command else "Export"
    return f"{verb} with: {guess.command}{guess.after}" if guess.command else guess.after


def _quoted(path: Path | str) -> str:
    return shlex.quote(str(path))


def _json_lines(path: Path, text: str) -> Guess | None:
    try:
        first = json.loads(text.partition("\n")[0])
    except ValueError:
        return None
    if not isinstance(first, dict) or not first:
        return None
    names = [name for name, value in first.items() if not isinstance(value, dict | list)]
    cells = ", ".join(f"[{json.dumps(name)}]".join((".", "")) for name in names)
    rows = f"({json.dumps(names)}, (inputs | [{cells}])) | @csv"
    command = f"jq -rn '{rows}' {_quoted(path)} > {_quoted(f'{path.stem}.csv')}"
    return Guess("JSON lines", command, _MAPPED)


def _csv(path: Path, text: str) -> Guess | None:
    lines = text.split("\n", 2)
    if len(lines) < 2:
        return None
    for delimiter in ",;\t|":
        try:
            names, second = (
                next(csv.reader([line], delimiter=delimiter), []) for line in lines[:2]
            )
        except csv.Error:  # not text, or lines that end in carriage returns
            continue
        if (
            len(names) > 2
            and len(names) == len(second)
            and all(names)
            and not names[0][0].isdigit()
        ):
            listed = ", ".join(names[:12])
            after = (
                f"Describe its columns ({listed}) by --map FILE.toml; docs/trace.md has an example."
            )
            what = "a table whose columns have other names"
            if delimiter == ",":
                return Guess(what, "", after)
            # Convert to commas, the default delimiter of a column map.
            convert = (
                "python3 -c 'import csv, sys; csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, "
                f"delimiter={json.dumps(delimiter)}))' < {_quoted(path)} > {_quoted(f'{path.stem}-commas.csv')}"
            )
            return Guess(what, convert, f". {after}")
    return None
