"""Define actions, outcomes and reasons, with the category of each reason (Table 3 of the study)."""

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
"""The advice of a diagnosis: an action, or `none` if there is nothing to do."""


Outcome = Literal[
    "completed",
    "completed_teardown_failed",
    "stopped",
    "failed",
    "running",
    "unknown",
]
"""The way in which a job ended."""


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
"""The statement of a line about the end of a job. The values mean, in this order: nothing, the
newest step, finished work, the success of one process, the success of the job, the failure of a
job, a job that did not start, a stop from outside. A line of the kind `scheduler` means a stop,
unless its rule sets `ending`."""


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
"""Each reason with its category: the reasons in Table 3 of the study, and some that have no row
there. A rule with the reason `Others` may set its own category."""
