-- Failed jobs and the GPU time that they held, by user and by what the cause is derived from.
SELECT
    cluster,
    is_gpu,
    username,
    state,
    reason,
    exit_code,
    count(*) AS n,
    sum(gpu_time_s) AS sum_gpu_time_s
FROM jobs
WHERE outcome = 'failed'
GROUP BY ALL
