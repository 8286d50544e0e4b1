"""Compute metrics that need more than arithmetic: a sandbox for generated code, a judge under a quota.

What enters is a program and its tests, or a request to a judge; what leaves is a verdict, or an answer.

| module | one idea |
|---|---|
| `code_eval` | pass@k as Hugging Face computes it, over verdicts of the sandbox |
| `sandbox/` | trials of generated programs in confined processes |
| `judge/proxy` | starts the proxy of a judge and returns how clients reach it |
| `judge/config` | the proxy's configuration and its first report |
| `judge/server` | the proxy: an OpenAI-compatible server under the quota, with answers kept |
| `judge/gate`, `judge/quota` | where a request waits until the quota admits it; the quota as a pure function |
| `judge/journal` | what survives the proxy: reservations and answers, also for reports |
"""
