"""WHAT IF: the policies of other rooms under a virtual clock.

`evaluate` predicts an evaluation: the same policy that runs it live, engines and nodes as arithmetic.
"""
