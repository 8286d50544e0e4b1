"""What to run where and when: a pure function, the same live, emulated and simulated.

`events` is what it hears and says, `state` what it knows, `decide` the function; `priors` predicts what a sample will
cost, `bound` says what no schedule can go below.
"""
