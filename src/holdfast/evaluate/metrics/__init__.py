"""Compute metrics that need more than arithmetic: generated code in a sandbox, a judge model.

The inputs are a program with its tests, or a request to a judge. The results are a verdict, or an
answer.

| module | one idea |
|---|---|
| `code_eval` | pass@k as Hugging Face computes it, from the verdicts of the sandbox |
| `sandbox/` | runs generated programs in confined processes |
| `judge/proxy` | starts the proxy of a judge and returns how clients reach the proxy |
| `judge/config` | the proxy's configuration and its statistics |
| `judge/server` | the proxy: an OpenAI-compatible server that enforces the quota and keeps the answers |
| `judge/gate`, `judge/quota` | makes requests wait for the quota; the quota as a pure function |
| `judge/journal` | reservations and answers that outlive the proxy, also for reports |
"""
