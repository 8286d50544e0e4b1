"""WHERE TIME GOES: from job records and telemetry to one report."""
