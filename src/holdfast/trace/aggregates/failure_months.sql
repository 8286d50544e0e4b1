-- Failures by the UTC month of their end, and by cause.
SELECT
    cluster,
    is_gpu,
    date_trunc('month', end_at) AS month,
    state,
    reason,
    exit_code,
    count(*) AS n,
    sum(gpu_time_s) AS sum_gpu_time_s
FROM jobs
WHERE outcome = 'failed' AND end_at IS NOT NULL
GROUP BY ALL
