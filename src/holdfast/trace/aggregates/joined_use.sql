-- Use of each job's devices while the job held them; one row per job and metric. Reads
-- `agg_joined_places`. The join is by device and hour, then exact: each sample is compared only
-- with the few jobs of its device in that hour.
WITH hours AS (
    SELECT *, unnest(generate_series(date_trunc('hour', start_at), end_at, INTERVAL 1 HOUR)) AS hour
    FROM agg_joined_places
    WHERE device IS NOT NULL
),
of_devices AS (
    SELECT
        cluster, job_id, hours.attempt, hours.username, hours.type, hours.gpu_num, hours.start_at, hours.end_at,
        samples.metric,
        device,
        count(*) AS n,
        sum(samples.value) AS sum_value,
        count(*) FILTER (samples.value < 5) AS n_idle,
        max(samples.value) AS max_value
    FROM samples
    JOIN hours USING (cluster, device)
    WHERE date_trunc('hour', samples.at) = hours.hour
        AND samples.at >= hours.start_at
        AND samples.at < hours.end_at
        AND samples.metric IN (
            'GPU_UTIL', 'SM_ACTIVE', 'FB_USED', 'NODE_CPU_UTILIZATION', 'NODE_MEMORY_UTILIZATION'
        )
    GROUP BY ALL
)
SELECT
    cluster, job_id, attempt, username, type, gpu_num, start_at, end_at, metric,
    count(*) AS n_devices,
    count(*) FILTER (max_value < 5) AS n_unused,
    sum(n) AS n,
    sum(sum_value) AS sum_value,
    sum(n_idle) AS n_idle,
    max(max_value) AS max_value
FROM of_devices
GROUP BY ALL
