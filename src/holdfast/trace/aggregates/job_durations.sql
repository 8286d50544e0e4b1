-- Value counts of the durations of jobs that ran, for exact distributions by any of the keys.
-- Rounded to the millisecond, so that the number of rows stays bounded.
SELECT
    cluster,
    is_gpu,
    type,
    round(duration_s, 3) AS duration_s,
    count(*) AS n,
    sum(gpu_time_s) AS sum_gpu_time_s
FROM jobs
WHERE duration_s IS NOT NULL
GROUP BY ALL
