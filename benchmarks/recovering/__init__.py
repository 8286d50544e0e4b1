"""What `benchmarks/recover.py` is made of: `jobs` that are struck, and a part a file.

`ranks` kills and freezes ranks, `nodes` kills nodes, `whole_runs` compares whole runs with several faults.
"""
