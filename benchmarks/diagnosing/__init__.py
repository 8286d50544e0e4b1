"""Parts of `benchmarks/diagnosis.py`.

`cases` are labelled logs. `systems` answer them: Holdfast, the `baselines`, and `nvrx`. `scoring`
and `calibrating` compare answers. `accuracy`, `compression`, `speed` (with `big_log`) and
`learning` make the rows.
"""
