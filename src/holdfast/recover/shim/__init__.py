"""Run one rank by a shim below PyTorch's launcher.

The shim starts a trainer process for each attempt.

1. `rank_shim`: the shim, a child of the launcher. It starts a trainer, keeps its output, reports
   its end, and starts the next one.
2. `imports`: records the modules that a warm process, which is started in advance, imports before
   it is needed
3. `trainer`: a process, warm or not, that waits for an order, and then becomes the trainer or forks
   it
4. `script`: runs the user's script in this interpreter
"""
