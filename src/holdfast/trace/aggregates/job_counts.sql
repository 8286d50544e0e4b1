-- Jobs and their GPU time by type, size and final state, for shares, rates and the table of
-- clusters. A job without a start has its submission as start and end; a job without an end has its
-- start as end.
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
    max(submit_at) AS max_submit_at,
    min(coalesce(start_at, submit_at)) AS min_start_at,
    max(coalesce(end_at, start_at, submit_at)) AS max_end_at
FROM jobs
GROUP BY ALL
