"""Run one rank: a shim below PyTorch's launcher, and the trainer process that the shim starts for each attempt.

1. `rank_shim`: the launcher's child; starts a trainer, keeps its output, reports its end, and starts the next one
2. `imports`: the modules that a warm process imports before it is needed
3. `trainer`: a process that waits for an order, warm or not, and then becomes the trainer or forks it
4. `script`: runs the user's script in this interpreter
"""
