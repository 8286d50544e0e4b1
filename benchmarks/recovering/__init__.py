"""Parts of `benchmarks/recover.py`.

`jobs` are struck. `ranks` kills and freezes ranks, `nodes` kills nodes, and `whole_runs` compares
whole runs with several faults.
"""
