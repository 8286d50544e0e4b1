"""The processes of the sandbox: what runs a generated program, and what tests it, each in a jail of its own.

What enters is a program and its tests, from `sandbox`; what leaves is a report of each jail.
The modules below import only the standard library: every process is a fork of one small parent.

| module | one idea |
|---|---|
| `forkserver` | the parent: builds the view of the file system once, forks a supervisor for each jail |
| `supervisor` | the first process of a jail: starts the jailed one, counts memory and time, ends everything |
| `confine` | what a jailed process gives up: user, capabilities, limits, files, system calls |
| `syscalls` | the system calls that Python has no name for |
| `codec` | values as plain data: exact builtin types and nothing that could act |
| `rpc` | one side of the socket between both: objects of the other process, calls and replies |
| `candidate` | runs the generated program and answers calls to it |
| `tester` | runs the tests against it and says the verdict |
"""
