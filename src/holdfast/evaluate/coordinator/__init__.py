"""One light process that everything dials into: it asks the policy, commits answers, and can be killed at any time.

`journal` is what survives it, `timeline` what happened when, `server` the process, `live` the state of the evaluation
between messages and policy.
"""
