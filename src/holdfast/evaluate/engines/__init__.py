"""Answer requests: an `Engine` in a process of its own (`worker`), one for each set of GPUs.

What enters are requests and folders of weights; what leaves are answers, with when they were begun and finished.

| module | one idea |
|---|---|
| `choose` | the class of a kind of engine, and the options that it has |
| `worker` | the process: loads, swaps, answers, ends; `uplink` is its connection to the coordinator |
| `canary` | fixed prompts that show whether the weights in an engine are the right ones |
| `hf/` | the reference: transformers on CPU or GPU, one request at a time (`exact`) or many (`batching`) |
| `openai` | any OpenAI-compatible server; `openai_calls` is its API |
| `vllm` | a vLLM server that the worker starts and swaps |
| `simulated` | answers after the time that a curve gives |
| `fit` | whether a model fits a device; `safetensors_files` reads headers |
"""
