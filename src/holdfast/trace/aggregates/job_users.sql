-- GPU time, waits and final states of each user's jobs.
SELECT
    cluster,
    username,
    is_gpu,
    state,
    count(*) AS n,
    count(queue_s) AS n_queued,
    sum(gpu_time_s) AS sum_gpu_time_s,
    sum(queue_s) AS sum_queue_s
FROM jobs
GROUP BY ALL
