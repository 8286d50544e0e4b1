"""Make charts of every kind by hand: as analyses make them, and as no analysis should."""

import numpy as np

from holdfast.trace.charts import Axis, Bars, Boxes, Figure, Heatmap, Lines, Series

CLUSTERS = (
    ("Seren", 120.0, 450_590),
    ("Kalos", 124.0, 20_019),
    ("Philly", 874.0, 113_000),
    ("Helios", 206.0, 3_360_000),
)
TYPES = ("Pretrain", "Evaluation", "SFT", "MLLM", "Debug", "Other")
HOSTILE = "<script>alert('x')</script> & \x1b[31mred\x1b[0m \u202etxt.exe $\\frac{1}{2}$"


def cdf(random, median, spread=2.0, n=400, zeros=0.0):
    x = np.sort(np.rint(median * np.exp(random.normal(0, spread, n))))
    x[: int(zeros * n)] = 0
    values, counts = np.unique(x, return_counts=True)
    return values, np.cumsum(counts) / n


def durations(seed=1, columns=2):
    random = np.random.default_rng(seed)
    jobs, queue = [], []
    for number, (name, median, n) in enumerate(CLUSTERS):
        role = "main" if number < 2 else "compared"
        label = f"{name} (n = {n:,})"
        x, y = cdf(random, median)
        jobs.append(Series(label=label, x=x, y=y, style="step", role=role))
        x, y = cdf(random, median / 20, zeros=0.3)
        queue.append(Series(label=label, x=x, y=y, style="step", role=role))
    share = Axis(label="share of jobs at most this long", low=0, high=1)
    return Figure(
        panels=[
            Lines(
                title="Duration",
                x=Axis(label="GPU job duration (s)", scale="log"),
                y=share,
                series=jobs,
            ),
            Lines(
                title="Queueing",
                x=Axis(label="time in the queue (s)", scale="log", low=1),
                y=share,
                series=queue,
            ),
        ],
        columns=columns,
    )


def by_type():
    random = np.random.default_rng(2)
    series = []
    for number, name in enumerate(TYPES):
        x, y = cdf(random, 30 * 4**number)
        series.append(
            Series(label=f"{name} (n = {400 * (number + 1):,})", x=x, y=100 * y, style="step")
        )
    axis = Axis(label="% of jobs", low=0, high=100)
    return Figure(panels=[Lines(x=Axis(label="duration (s)", scale="log"), y=axis, series=series)])


def demand():
    at = 1_677_628_800 + 3600.0 * np.arange(24 * 30)
    random = np.random.default_rng(3)
    used = 1500 + 500 * np.sin(at / 86400 * 2 * np.pi) + random.normal(0, 60, len(at))
    used[200:230] = np.nan
    return Figure(
        panels=[
            Lines(
                x=Axis(label="day, UTC", scale="time"),
                y=Axis(label="GPUs held"),
                series=[
                    Series(
                        label="held, hourly mean", x=at, y=used, low=used - 150, high=used + 150
                    ),
                    Series(
                        label="installed",
                        x=at[[0, -1]],
                        y=np.array([2288.0, 2288.0]),
                        style="dashed",
                    ),
                ],
            )
        ],
        columns=1,
    )


def gpus():
    sizes = 2.0 ** np.arange(-1, 12)
    grow = np.cumsum(1 / np.arange(1, 14)) / np.sum(1 / np.arange(1, 14))
    by = [
        Series(label=f"by {of}", x=sizes, y=y, style="step")
        for of, y in (("jobs", grow), ("GPU time", grow**3))
    ]
    return Figure(
        panels=[
            Lines(
                x=Axis(label="GPUs a job", scale="log2"),
                y=Axis(label="share", low=0, high=1),
                series=by,
            )
        ]
    )


def outcomes(stacked=True):
    parts = {
        "completed": np.array([49.7, 54.1, 60.4, 62.4]),
        "cancelled": np.array([7.5, 6.2, 9.0, 22.1]),
        "failed": np.array([42.9, 39.7, 30.5, 15.5]),
    }
    names = [name for name, *_ in CLUSTERS]
    return Figure(
        panels=[
            Bars(
                title=title,
                value=Axis(label=f"% of {title}", low=0, high=100),
                groups=names,
                parts=parts,
                stacked=stacked,
            )
            for title in ("jobs", "GPU time")
        ]
    )


def reasons():
    counts = np.array([1890.0, 620, 568, 266, 54, 12, 1, 0, np.nan])
    names = [
        "all of Script",
        "TypeError",
        "FileNotFoundError",
        "OSError",
        "NVLinkError",
        "ECCError",
        "NCCLRemoteError",
    ]
    return Figure(
        panels=[
            Bars(
                value=Axis(label="failures", scale="log"),
                groups=[*names, "nothing at all", "not known"],
                parts={"failures": counts},
                low={"failures": counts * 0.8},
                high={"failures": counts * 1.2},
            )
        ]
    )


def boxes():
    five = np.array(
        [
            [1.0, 8, 64, 256, 1024],
            [1, 1, 1, 4, 8],
            [0, 1, 8, 8, 16],
            [np.nan] * 5,
            [8] * 5,
            [1, 2, 4, 8, 512],
        ]
    )
    return Figure(
        panels=[Boxes(value=Axis(label="GPUs a job", scale="log2"), groups=TYPES, five=five)]
    )


def week():
    hours = np.arange(24)
    values = 1000 + 700 * np.sin((hours - 9) / 24 * 2 * np.pi) * np.linspace(1, 0.3, 7)[:, None]
    values[3, 5:8] = np.nan
    days = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
    return Figure(
        panels=[
            Heatmap(
                x=Axis(
                    label="hour of the day", scale="category", ticks=[str(hour) for hour in hours]
                ),
                y=Axis(label="", scale="category", ticks=days),
                values=values,
                unit="jobs an hour",
            )
        ],
        columns=1,
    )


def scatter():
    random = np.random.default_rng(5)
    x, y = 10 ** random.uniform(0, 4, 900), 10 ** random.uniform(-2, 6, 900)
    few = np.array([1.0, 8, 64, 512])
    return Figure(
        panels=[
            Lines(
                x=Axis(label="GPUs", scale="log"),
                y=Axis(label="failures a GPU year", scale="log"),
                series=[
                    Series(label="jobs", x=x, y=y, style="points"),
                    Series(
                        label="mean", x=few, y=few * 10, low=few * 4, high=few * 30, style="points"
                    ),
                    Series(label="model", x=few, y=few * 9, style="dashed"),
                ],
            )
        ]
    )


def many():
    random = np.random.default_rng(6)
    series = []
    for number in range(12):
        x, y = cdf(random, 10 * 1.6**number, n=120)
        series.append(
            Series(label=f"virtual cluster {number} with a long name", x=x, y=y, style="step")
        )
    return Figure(
        panels=[
            Lines(
                x=Axis(label="queueing delay (s)", scale="symlog"),
                y=Axis(label="share", low=0, high=1),
                series=series,
            )
        ]
    )


def edges():
    nothing, one = np.empty(0), np.array([42.0])
    huge = np.array([1.0, 1e5, 1e18])
    line = Axis(label="value")
    return Figure(
        panels=[
            Lines(
                title="One point", x=Axis(label="x (s)", scale="log"), y=line,
                series=[Series(label="one", x=one, y=one)],
            ),
            Lines(title="Nothing", x=line, y=line, series=[Series(label="none", x=nothing, y=nothing)]),
            Lines(title="No series", x=line, y=Axis(label="y", scale="log"), series=[]),
            Lines(
                title="All NaN", x=Axis(label="x", scale="log2"), y=line,
                series=[Series(label="nan", x=one * np.nan, y=one * np.nan, style="step")],
            ),
            Lines(
                title="Huge", x=Axis(label="x", scale="log"), y=line,
                series=[Series(label="huge", x=huge, y=huge * 1e6, style="line")],
            ),
            Lines(
                title="Zeros on logarithms", x=Axis(label="x", scale="log"), y=Axis(label="count", scale="log"),
                series=[Series(label="z", x=np.array([0.0, 1, 2, 3]), y=np.array([5.0, 0, 7, 9]))],
            ),
            Bars(
                title=HOSTILE, value=line, groups=[HOSTILE, "b" * 200, "名前"],
                parts={HOSTILE: np.array([1.0, 2, 3])},
            ),
            Bars(title="All zero", value=Axis(label="n", scale="log"), groups=["a"], parts={"n": np.zeros(1)}),
            Bars(title="No groups", value=line, groups=[], parts={}),
            Bars(
                title="Losses", value=Axis(label="change (s)"), groups=["a", "b"],
                parts={"n": np.array([-4000.0, 9000])},
            ),
            Bars(
                title="To the very end", value=Axis(label="share (s)", low=0, high=1), groups=["a long name " * 3, "b"],
                parts={"n": np.array([0.9999, 1.0])},
            ),
            Boxes(title="No boxes", value=line, groups=[], five=np.empty((0, 5))),
            Heatmap(title="Blank", x=line, y=line, values=np.full((2, 3), np.nan), unit=""),
            Heatmap(
                title="Long names", unit="GPU hours",
                x=Axis(label="", scale="category", ticks=[f"state {'long ' * 4}{n}" for n in range(5)]),
                y=Axis(label="", scale="category", ticks=[f"a virtual cluster with a long name {n}" for n in range(4)]),
                values=np.arange(20.0).reshape(4, 5) * 1e6,
            ),
        ]
    )  # fmt: skip


def all_figures():
    return {
        "durations": durations(), "by_type": by_type(), "demand": demand(), "gpus": gpus(), "outcomes": outcomes(),
        "grouped": outcomes(stacked=False), "reasons": reasons(), "boxes": boxes(), "week": week(),
        "scatter": scatter(), "many": many(), "edges": edges(),
    }  # fmt: skip
