-- Value counts of the time from a GPU job's failure to its restart, by cause and size. The restart
-- is the start of the job's next attempt; without one, the first start among jobs that the same
-- user submits later with the same name and GPUs. NULL: there was no restart. A trace that is
-- divided loses the pairs across the cut only. Times are rounded to the second, above an hour to
-- the minute. One hash replaces the four keys, which halves the time of the join.
WITH gpu_jobs AS (
    SELECT
        *,
        CASE WHEN username IS NOT NULL THEN hash(cluster, username, coalesce(name, ''), gpu_num) END AS work
    FROM jobs
    WHERE is_gpu
),
failed AS (
    SELECT cluster, job_id, attempt, work, state, reason, exit_code, gpu_num, end_at
    FROM gpu_jobs
    WHERE outcome = 'failed' AND end_at IS NOT NULL
),
started AS (
    -- Among jobs submitted at one time take the first to start, so that the order of rows has no effect.
    SELECT work, submit_at, min(start_at) AS start_at
    FROM gpu_jobs
    WHERE start_at IS NOT NULL AND submit_at IS NOT NULL AND work IS NOT NULL
    GROUP BY work, submit_at
),
attempts AS (
    SELECT cluster, job_id, attempt, start_at FROM gpu_jobs WHERE attempt > 0 AND start_at IS NOT NULL
),
resumed AS (
    SELECT
        failed.cluster,
        failed.state,
        failed.reason,
        failed.exit_code,
        failed.gpu_num,
        epoch(coalesce(attempts.start_at, started.start_at) - failed.end_at) AS restart_s
    FROM failed
    LEFT JOIN attempts
        ON attempts.cluster = failed.cluster
        AND attempts.job_id = failed.job_id
        AND attempts.attempt = failed.attempt + 1
    ASOF LEFT JOIN started
        ON started.work = failed.work
        AND failed.end_at <= started.submit_at
)
SELECT
    cluster,
    state,
    reason,
    exit_code,
    gpu_num,
    CASE WHEN restart_s < 3600 THEN round(restart_s) ELSE 60 * round(restart_s / 60) END AS restart_s,
    count(*) AS n
FROM resumed
GROUP BY ALL
