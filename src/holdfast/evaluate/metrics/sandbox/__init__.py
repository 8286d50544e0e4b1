"""Run a generated program and its tests in jails, with a small tree of processes.

The inputs, from `sandbox`, are a program and its tests; the results are reports about the jails.
Every process is a fork of one small parent, so all modules but `sandbox` import only the standard
library.

| module | one idea |
|---|---|
| `forkserver` | the parent: builds the jails' view of the file system once, forks a supervisor for each jail |
| `supervisor` | the first process of a jail: starts the jailed process, limits memory and time, ends everything |
| `confine` | drops a jailed process's rights: user, capabilities, limits, files, system calls |
| `syscalls` | system calls that Python does not offer |
| `codec` | encodes values as plain data: exact builtin types without behaviour |
| `rpc` | one side of the socket between program and tests: remote objects, calls and replies |
| `candidate` | runs the generated program and answers calls to it |
| `tester` | runs the tests against the program and writes the verdict |
"""
