"""Add Holdfast to a training script, and examine a host before the first run.

`adoption_of` reads a training script and returns the diff that adds Holdfast:

- `script`: the bytes, the syntax tree, and edits by positions;
- `trainers`: Hugging Face's Trainer, Lightning, torchtitan;
- `training_parts` and `plain_loop`: a loop of the script's own, also with FSDP2;
- `adoption`: the kind of the script, the diff, the write.

`examine` runs checks of this host, and yields each fault with the command that mends the fault:

- `doctor.findings`: a check's answer;
- `doctor.software`, `doctor.limits`, `doctor.machine`, `doctor.schedulers`: the checks;
- `doctor.checking`: a process that runs checks, and may hang without harm;
- `doctor.examine`: the limit of each check.
"""

from holdfast.adopt.adoption import KINDS, Adoption, adoption_of
from holdfast.adopt.doctor.examine import examine
from holdfast.adopt.doctor.findings import Finding, Outcome

__all__ = ["KINDS", "Adoption", "Finding", "Outcome", "adoption_of", "examine"]
