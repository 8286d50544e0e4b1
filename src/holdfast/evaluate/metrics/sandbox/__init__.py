"""Confine a generated program and its tests in jails, by a small tree of processes.

The inputs, from `sandbox`, are a program and its tests; the results are reports of the jails. The
modules below import only the standard library: every process is a fork of one small parent.

| module | one idea |
|---|---|
| `forkserver` | the parent: builds the view of the file system once, forks a supervisor for each jail |
| `supervisor` | the first process of a jail: starts the jailed one, counts memory and time, ends everything |
| `confine` | drops a jailed process's rights: user, capabilities, limits, files, system calls |
| `syscalls` | the system calls that Python has no name for |
| `codec` | values as plain data: exact builtin types without behaviour |
| `rpc` | one side of the socket between both: objects of the other process, calls and replies |
| `candidate` | runs the generated program and answers calls to it |
| `tester` | runs the tests against it and writes the verdict |
"""
