"""What answers requests: an `Engine` in a process of its own (`worker`), one a set of GPUs.

What enters are requests and folders of weights; what leaves are answers, with when they were begun and finished.

| module | one idea |
|---|---|
| `engine` | the seam |
| `choose` | a kind's name to its class, and to the options that it has |
| `worker` | the process: loads, swaps, answers, ends; `uplink` is its line, `pulse` whether it hangs |
| `transformers` | the reference, on CPU or GPU; `hf_work` orders what it does |
| `hf_exact` | one request at a time, with the bits of stock lm-eval; `hf_sampling` and `hf_stops` choose and end |
| `hf_calls` | how the model is called; `hf_replay` repeats a small model's forward without its Python |
| `hf_batching` | free mode: many at a time |
| `hf_weights` | loading, and swapping in place; `hf_curve` measures; `canary` shows that weights are right |
| `openai` | any OpenAI-compatible server; `openai_calls` is its API |
| `vllm` | vLLM's server, started and swapped by us |
| `simulated` | answers after the time a curve says |
| `fit` | whether a model fits a device; `safetensors_files` reads headers |
"""
