-- Jobs and their GPU time by type, size and final state: the sums behind shares, rates and the table of clusters.
SELECT
    cluster,
    is_gpu,
    type,
    type_rule,
    state,
    gpu_num,
    count(*) AS n,
    sum(gpu_time_s) AS sum_gpu_time_s,
    min(submit_at) AS min_submit_at,
    max(submit_at) AS max_submit_at
FROM jobs
GROUP BY ALL
