"""Add Holdfast to a training script, and examine a host before the first run.

`adoption_of` reads a training script and returns the diff that adds Holdfast:

- `script`: the bytes, the syntax tree, and edits by positions;
- `trainers`: scripts that use Hugging Face's Trainer, Lightning or torchtitan;
- `training_parts` and `plain_loop`: scripts with their own training loop, also with FSDP2;
- `adoption`: the choice between these kinds, the diff, and the write.

`examine` checks this host, and yields each fault with the command that fixes the fault:

- `doctor.findings`: the result of a check;
- `doctor.software`, `doctor.limits`, `doctor.machine`, `doctor.schedulers`: the checks;
- `doctor.checking`: a process that runs checks, and may hang without harm;
- `doctor.examine`: the time limit of each check.
"""

from holdfast.adopt.adoption import KINDS, Adoption, adoption_of
from holdfast.adopt.doctor.examine import examine
from holdfast.adopt.doctor.findings import Finding, Outcome

__all__ = ["KINDS", "Adoption", "Finding", "Outcome", "adoption_of", "examine"]
