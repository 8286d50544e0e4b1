-- GPUs in use, jobs waiting and GPUs waited for, as changes within each hour, numbered from the
-- Unix epoch. A change of `step` with `rest_s` left of its hour adds step x rest_s to that hour's
-- integral and step x 3600 to the integral of every later hour. So each integral is exact, and a
-- job of weeks needs as many rows as a job of seconds.
WITH spans AS (
    SELECT
        cluster,
        type,
        pool,
        gpu_num,
        epoch(submit_at) AS submit_s,
        epoch(start_at) AS start_s,
        epoch(end_at) AS end_s,
        coalesce(start_at >= submit_at, FALSE)::INTEGER AS waited,
        coalesce(end_at >= start_at, state = 'RUNNING', FALSE)::INTEGER AS ran
    FROM jobs
    WHERE is_gpu AND start_at IS NOT NULL
),
changes AS (
    SELECT cluster, type, pool, gpu_num, submit_s AS second, 0 AS busy, 1 AS waiting FROM spans WHERE waited = 1
    UNION ALL
    SELECT cluster, type, pool, gpu_num, start_s, ran, -waited FROM spans
    UNION ALL
    SELECT cluster, type, pool, gpu_num, end_s, -1, 0 FROM spans WHERE ran = 1 AND end_s IS NOT NULL
),
placed AS (
    SELECT *, floor(second / 3600)::INTEGER AS hour, 3600 * (floor(second / 3600) + 1) - second AS rest_s FROM changes
)
SELECT
    cluster,
    type,
    pool,
    hour,
    sum(busy * gpu_num) AS sum_busy_step,
    sum(busy * gpu_num * rest_s) AS sum_busy_rest_s,
    sum(waiting) AS sum_waiting_step,
    sum(waiting * rest_s) AS sum_waiting_rest_s,
    sum(waiting * gpu_num) AS sum_wanted_step,
    sum(waiting * gpu_num * rest_s) AS sum_wanted_rest_s
FROM placed
GROUP BY ALL
