"""Answer requests: an `Engine` runs in a process of its own (`worker`), one for each set of GPUs.

The inputs are requests and folders of weights. The results are answers with their start and end
times.

| module | one idea |
|---|---|
| `choose` | finds the class of a kind of engine, and checks its options |
| `worker` | the process: loads, swaps, answers, ends; `uplink` is its connection to the coordinator |
| `canary` | fixed prompts that identify the weights in an engine |
| `hf/` | the reference: transformers on CPU or GPU, one request at a time (`exact`) or many (`batching`) |
| `openai` | any OpenAI-compatible server; `openai_calls` is its API |
| `vllm` | a vLLM server that the worker starts and swaps |
| `simulated` | answers after the time that a cost curve predicts |
| `fit` | computes whether a model fits on a device; `safetensors_files` reads headers |
"""
