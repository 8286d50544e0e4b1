-- Jobs and the GPU time that they held, by final state, size and, for failures, cause.
SELECT
    cluster,
    is_gpu,
    type,
    state,
    outcome,
    CASE WHEN outcome = 'failed' THEN reason END AS reason,
    CASE WHEN outcome = 'failed' THEN exit_code END AS exit_code,
    gpu_num,
    count(*) AS n,
    count(run_s) AS n_ran,
    sum(run_s) AS sum_run_s,
    sum(gpu_time_s) AS sum_gpu_time_s
FROM jobs
GROUP BY ALL
