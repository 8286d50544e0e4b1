"""What a metric may need beyond arithmetic: a sandbox for generated code, a judge under a quota.

What enters is a program and its tests, or a request to a judge; what leaves is a verdict, or an answer.

| module | one idea |
|---|---|
| `code_eval` | pass@k as Hugging Face computes it, over verdicts of the sandbox |
| `sandbox` | trials of generated programs; `jail/` holds its processes |
| `judge` | starts the proxy of a judge and says how clients reach it |
| `judge_config` | what the proxy is told and what it tells |
| `judge_server` | the proxy: an OpenAI-compatible server under the quota, with answers kept |
| `judge_gate` | where a request waits until the quota lets it through |
| `judge_journal` | what survives it: reservations and answers |
| `judged` | what the journal says was answered in a stretch of time, for reports |
| `quota` | when a judge may be asked, as a pure function |
"""
