"""Compute metrics beyond arithmetic: a sandbox for generated code, a judge under a quota.

The inputs are a program with its tests, or a request to a judge. The results are a verdict, or an
answer.

| module | one idea |
|---|---|
| `code_eval` | pass@k as Hugging Face computes it, over verdicts of the sandbox |
| `sandbox/` | trials of generated programs in confined processes |
| `judge/proxy` | starts the proxy of a judge and returns how clients reach it |
| `judge/config` | the proxy's configuration and its first report |
| `judge/server` | the proxy: an OpenAI-compatible server under the quota, with answers kept |
| `judge/gate`, `judge/quota` | the wait for the quota; the quota as a pure function |
| `judge/journal` | reservations and answers that survive the proxy, also for reports |
"""
