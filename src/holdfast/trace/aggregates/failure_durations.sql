-- Value counts of the run times of failed jobs, by cause and size. Rounded to the millisecond, as
-- in `job_durations`.
SELECT
    cluster,
    is_gpu,
    state,
    reason,
    exit_code,
    gpu_num,
    round(run_s, 3) AS run_s,
    count(*) AS n
FROM jobs
WHERE outcome = 'failed' AND run_s IS NOT NULL
GROUP BY ALL
