"""Define the actions, and the category of each reason (Table 3 of the study)."""

from collections.abc import Mapping
from typing import Final, Literal

Action = Literal[
    "restart",
    "exclude_and_restart",
    "reset_gpu",
    "wait_and_retry",
    "change_config",
    "user_must_fix",
]


Advice = Action | Literal["none"]
"""The advice of a diagnosis: an action, or `none` if nothing is to be done."""


Outcome = Literal[
    "completed",
    "completed_teardown_failed",
    "stopped",
    "failed",
    "running",
    "unknown",
]
"""The end of a job."""


Ending = Literal[
    "",
    "step",
    "work_done",
    "process_succeeded",
    "job_succeeded",
    "job_failed",
    "never_began",
    "stopped",
]
"""The statement of a line about the end of a job: none, the newest step, finished work, the success
of one process or of the job, the failure of a job, a job that did not start, a stop from outside.
Lines of the kind `scheduler` mean a stop, unless `ending` is set."""


Category = Literal["Infrastructure", "Framework", "Script", "Unknown"]


CATEGORIES: Final[Mapping[str, Category]] = {
    "NVLinkError": "Infrastructure",
    "CUDAError": "Infrastructure",
    "NodeFailure": "Infrastructure",
    "ECCError": "Infrastructure",
    "NetworkError": "Infrastructure",
    "ConnectionError": "Infrastructure",
    "S3StorageError": "Infrastructure",
    "NCCLTimeoutError": "Infrastructure",
    "NCCLRemoteError": "Infrastructure",
    "DataloaderKilled": "Framework",
    "AttributeError": "Framework",
    "OutOfMemoryError": "Framework",
    "RuntimeError": "Framework",
    "AssertionError": "Framework",
    "ValueError": "Framework",
    "ZeroDivisionError": "Framework",
    "ModelLoadingError": "Framework",
    "DatasetLoadingError": "Framework",
    "FileNotFoundError": "Script",
    "OSError": "Script",
    "TypeError": "Script",
    "NameError": "Script",
    "PermissionError": "Script",
    "ImportError": "Script",
    "KeyError": "Script",
    "SyntaxError": "Script",
    "ArgumentError": "Script",
    "CalledProcessError": "Script",
    "IndexError": "Script",
    "Others": "Unknown",
    "Unknown": "Unknown",
}
"""Each reason and its category: Table 3 of the paper, plus reasons that have no row there. A rule
with the reason `Others` may set its own category."""
