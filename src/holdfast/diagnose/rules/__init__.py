"""Say which event one line means, and which events can cause which: `topics/*.yaml`, `tables/*.tsv`, `causes.yaml`."""
