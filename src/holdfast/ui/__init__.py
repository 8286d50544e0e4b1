"""The page about runs: one offline file that answers first and proves below.

Enter `RunSummary` objects of `holdfast.core.accounting`, leaves an HTML file. The stages, in order:

| module | one idea |
|---|---|
| `headline` | the answer in one sentence, and the key figures |
| `cards` | an incident's card |
| `view` | every other section's words, computed from the summary |
| `charts` | the loss curve and the time line, and their colours |
| `run_report` | the template filled and written, whole or not at all |
"""

from holdfast.ui.run_report import write_report

__all__ = ["write_report"]
