"""Parts of `benchmarks/diagnosis.py`.

`cases` are labelled logs, `systems` what answers about them (ours, `baselines`, `nvrx`), `scoring` and `calibrating`
compare; `accuracy`, `compression`, `speed` (with `big_log`) and `learning` make the rows.
"""
