-- Jobs waiting, by the number of GPUs that they wait for, as changes within each hour: see
-- job_hours.
WITH changes AS (
    SELECT cluster, gpu_num, epoch(submit_at) AS second, 1 AS waiting FROM jobs WHERE is_gpu AND start_at >= submit_at
    UNION ALL
    SELECT cluster, gpu_num, epoch(start_at), -1 FROM jobs WHERE is_gpu AND start_at >= submit_at
),
placed AS (
    SELECT *, floor(second / 3600)::INTEGER AS hour, 3600 * (floor(second / 3600) + 1) - second AS rest_s FROM changes
)
SELECT
    cluster,
    gpu_num,
    hour,
    sum(waiting) AS sum_waiting_step,
    sum(waiting * rest_s) AS sum_waiting_rest_s
FROM placed
GROUP BY ALL
