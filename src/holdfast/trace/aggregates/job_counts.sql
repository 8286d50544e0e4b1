-- Jobs and what they took, by type, size and final state: the sums behind shares, rates, means and the table of clusters.
SELECT
    cluster,
    is_gpu,
    type,
    state,
    gpu_num,
    count(*) AS n,
    count(duration_s) AS n_ran,
    count(queue_s) AS n_queued,
    sum(duration_s) AS sum_duration_s,
    sum(gpu_time_s) AS sum_gpu_time_s,
    sum(queue_s) AS sum_queue_s,
    min(submit_at) AS min_submit_at,
    max(submit_at) AS max_submit_at,
    max(end_at) AS max_end_at
FROM jobs
GROUP BY ALL
